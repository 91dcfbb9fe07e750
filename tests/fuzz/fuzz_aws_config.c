/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_aws_config.c - any bytes as a file of AWS settings, both kinds. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "remote/aws_config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const char *text, size_t size, enum aws_file kind)
{
    CLEANUP(aws_config_freep) struct aws_config *c = aws_config_new();
    struct err e = {0};
    int rc = c ? aws_config_add(c, kind, text, size, &e) : 0;

    if (rc != 0 && rc != -EBADMSG && rc != -EFBIG) {
        fprintf(stderr, "%d: %s\n", rc, e.text);
        abort();
    }
    if (!c)
        return;
    for (const char *profile = "default"; profile;
         profile = strcmp(profile, "p") == 0 ? NULL : "p") {
        const char *value = aws_config_get(c, profile, "s3.endpoint_url");

        if (value && (value[0] == '\0' || strlen(value) > size))
            abort();
        aws_config_service_endpoint(c, profile, "s3");
        aws_config_has_profile(c, profile);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE char *text = malloc(size ? size : 1); /* no byte more than there is */

    if (!text)
        return 0;
    if (size > 0)
        memcpy(text, data, size);
    check(text, size, AWS_FILE_CREDENTIALS);
    check(text, size, AWS_FILE_CONFIG);
    return 0;
}
