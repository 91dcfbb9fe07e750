/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_key.h - keys of classic OLMo's safetensors: paths as base64 pickles. */
#ifndef UFS_INDEX_FORMATS_OLMO_KEY_H
#define UFS_INDEX_FORMATS_OLMO_KEY_H

#include "base/base.h"

struct buf;
struct err;

/*
 * Takes apart a key that is base64url of a pickle of ((part, ...), pickled): appends the
 * parts, texts or integers, joined by dots. `pickled`: the bytes of that tensor are
 * themselves a pickle. -EBADMSG when it is no such thing.
 */
int olmo_key_decode(const char *text, size_t len, struct buf *key, bool *pickled,
                    struct err *e);

/*
 * For bids: the first key of a safetensors file, or of the dict that torch.save wrote into
 * a zip, as the file's first bytes have it. NULL when it is not to be seen there.
 */
const char *olmo_first_key(const char *head, size_t len, size_t *key_len);
const char *olmo_first_torch_key(const char *head, size_t len, size_t *key_len);

#endif
