/* SPDX-License-Identifier: MIT */
/* remote/http_wire_priv.h - libcurl's types, for the files of the wire and no others. */
#ifndef UFS_REMOTE_HTTP_WIRE_PRIV_H
#define UFS_REMOTE_HTTP_WIRE_PRIV_H

#include <curl/curl.h>

#include "remote/http_wire.h"

/* Lines "name: value" that a request is sent with. */
struct http_header_list {
    struct curl_slist *line;
};

#endif
