/* SPDX-License-Identifier: MIT */
/* remote/xml.c - expat, with limits: no entities, no depth, no long texts. */
#include "remote/xml.h"

#include <errno.h>
#include <expat.h>
#include <limits.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"

enum {
    DEPTH_MAX = 16,      /* answers have five */
    TEXT_MAX = 64 << 10, /* keys have 1 KiB, encoded three */
};

struct walk {
    XML_Parser parser;
    xml_fn *fn;
    void *user;
    struct err *e;
    int ret; /* of fn, or ours; the parser is stopped then */
    struct buf path;
    unsigned depth;
    /* Of each open element: where its text begins. */
    struct buf text;
    size_t start[DEPTH_MAX + 1];
};

/* expat 2.9 warns of the one and has the other. */
#if XML_MAJOR_VERSION > 2 || XML_MINOR_VERSION >= 9
#define LINE_OF XML_GetCurrentLineNumber64
#else
#define LINE_OF XML_GetCurrentLineNumber
#endif

static void stop(struct walk *w, int ret)
{
    w->ret = ret;
    XML_StopParser(w->parser, XML_FALSE);
}

static void XMLCALL begin_element(void *user, const XML_Char *name,
                                  const XML_Char **attributes)
{
    struct walk *w = user;
    const char *colon = strchr(name, ':');

    (void)attributes;
    if (w->ret)
        return;
    if (++w->depth > DEPTH_MAX) {
        stop(w, err_set(w->e, EBADMSG, "XML: elements are too deep"));
        return;
    }
    w->start[w->depth] = w->text.len;
    if (w->path.len > 0)
        buf_addc(&w->path, '/');
    buf_adds(&w->path, colon ? colon + 1 : name);
    if (buf_failed(&w->path))
        stop(w, err_set(w->e, EBADMSG, "XML: names are too long"));
}

static void XMLCALL end_element(void *user, const XML_Char *name)
{
    struct walk *w = user;
    const char *slash;
    size_t from;
    int ret;

    (void)name;
    if (w->ret) /* an empty element ends even when its begin stopped the parser */
        return;
    from = w->start[w->depth];
    buf_addc(&w->text, '\0');
    if (buf_failed(&w->text)) {
        stop(w, err_set(w->e, EBADMSG, "XML: a text is too long"));
        return;
    }
    ret =
        w->fn(w->user, w->path.data, w->text.data + from, w->text.len - from - 1, w->e);
    if (ret)
        stop(w, ret);
    w->text.len = from;
    w->depth--;
    slash = strrchr(w->path.data, '/');
    w->path.len = slash ? (size_t)(slash - w->path.data) : 0;
    w->path.data[w->path.len] = '\0';
}

static void XMLCALL take_text(void *user, const XML_Char *text, int len)
{
    struct walk *w = user;

    buf_add(&w->text, text, (size_t)len);
}

static void XMLCALL refuse_doctype(void *user, const XML_Char *name,
                                   const XML_Char *system, const XML_Char *public,
                                   int internal)
{
    struct walk *w = user;

    (void)name;
    (void)system;
    (void)public;
    (void)internal;
    stop(w, err_set(w->e, EBADMSG, "XML: a document type is not read"));
}

static int parse(struct walk *w, const char *data, size_t len)
{
    XML_SetUserData(w->parser, w);
    XML_SetElementHandler(w->parser, begin_element, end_element);
    XML_SetCharacterDataHandler(w->parser, take_text);
    XML_SetStartDoctypeDeclHandler(w->parser, refuse_doctype);
    if (len > INT_MAX)
        return err_set(w->e, EBADMSG, "XML: %zu bytes", len);
    if (XML_Parse(w->parser, data, (int)len, XML_TRUE) == XML_STATUS_OK || w->ret)
        return w->ret;
    return err_set(w->e, EBADMSG, "XML: %s in line %lu",
                   XML_ErrorString(XML_GetErrorCode(w->parser)),
                   (unsigned long)LINE_OF(w->parser));
}

int xml_each(const void *data, size_t len, xml_fn *fn, void *user, struct err *e)
{
    struct walk w = {.fn = fn,
                     .user = user,
                     .e = e,
                     .path = {.max = TEXT_MAX},
                     .text = {.max = TEXT_MAX}};
    int ret;

    w.parser = XML_ParserCreate(NULL);
    if (!w.parser)
        return err_nomem(e);
    ret = parse(&w, data, len);
    XML_ParserFree(w.parser);
    buf_release(&w.path);
    buf_release(&w.text);
    return ret;
}
