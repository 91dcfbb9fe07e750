/* SPDX-License-Identifier: MIT */
/* remote/hub.h - repositories of the Hugging Face Hub as a store of objects. */
#ifndef UFS_REMOTE_HUB_H
#define UFS_REMOTE_HUB_H

struct err;
struct store;
struct store_options;

/*
 * hf://[datasets/|spaces/]ORG/NAME[@REVISION][/PATH], at $HF_ENDPOINT or huggingface.co. The
 * revision is looked up once: the store shows that commit as long as it lives. The token is
 * the one that huggingface_hub would take ($HF_TOKEN, $HF_TOKEN_PATH, $HF_HOME/token); it
 * goes to the Hub alone, never to where the Hub sends us for large files.
 *
 * -ENOENT: no such path or revision; -EACCES: no such
 * repository, or one that is not open to us (the Hub says not which).
 */
int hub_open(const char *url, const struct store_options *options, struct store **out,
             struct err *e);

#endif
