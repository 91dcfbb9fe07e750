/* SPDX-License-Identifier: MIT */
/* remote/xml.h - the XML answers of object stores, element by element. */
#ifndef UFS_REMOTE_XML_H
#define UFS_REMOTE_XML_H

#include "base/base.h"

struct err;

/*
 * An element has ended: `path` are the names from the document's element down to it
 * ("ListBucketResult/Contents/Key"), without prefixes of namespaces; `text` is what stands
 * directly in it, with a NUL behind its `len` bytes. Elements within it were told before.
 */
typedef int xml_fn(void *user, const char *path, const char *text, size_t len,
                   struct err *e);

/*
 * Calls fn for each element and returns what it returned that is not 0. -EBADMSG: that is
 * no XML, has a document type (entities), or elements too deep or too long for any answer.
 */
int xml_each(const void *data, size_t len, xml_fn *fn, void *user, struct err *e);

#endif
