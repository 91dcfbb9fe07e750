/* SPDX-License-Identifier: MIT */
/* remote/s3_name.c - what a URL of S3 or Google's storage names: a bucket or access point, a key. */
#include "remote/s3_name.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/err.h"

bool s3_region_is_safe(const char *name)
{
    size_t len = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                              "0123456789-_");

    return len > 0 && len < S3_REGION_SIZE && name[len] == '\0';
}

static bool bucket_is_safe(const char *name)
{
    size_t len = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                              "0123456789._-");

    return len > 0 && len <= 255 && name[len] == '\0' && !strstr(name, "..") &&
           name[0] != '.';
}

bool s3_name_is_label(const char *name)
{
    size_t len = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-");

    return len >= 3 && len <= 63 && name[len] == '\0' && name[0] != '-' &&
           name[len - 1] != '-';
}

static bool ends_with(const char *text, const char *end)
{
    size_t len = strlen(text), n = strlen(end);

    return len >= n && strcmp(text + len - n, end) == 0;
}

/* The field's end: ':' or '/', or the end of the text. */
static size_t field(const char *text)
{
    return strcspn(text, ":/");
}

static int not_an_access_point(const char *url, struct err *e)
{
    err_set(e, ENOTSUP, "%s: an ARN of another kind than an access point of a region",
            url);
    return err_hint(e, "s3://arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME/PREFIX, or the "
                       "alias of what it is, as a bucket's name");
}

/*
 * "arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME[/KEY]", where a ':' may stand for the first
 * '/': the name and the account make the host, and requests are signed for its region
 * (botocore's utils.py, S3EndpointSetter).
 */
static int take_access_point(struct s3_name *s, const char *url, char **key,
                             struct err *e)
{
    const char *at = strstr(url, "://") + 3, *part[6];
    int len[6];

    for (size_t i = 0; i < ARRAY_SIZE(part); i++) {
        part[i] = at;
        len[i] = (int)field(at);
        at += len[i];
        if (*at != (i < 5 ? ':' : '/') && !(i == 5 && *at == ':'))
            return not_an_access_point(url, e);
        at++;
    }
    if (len[2] != 2 || memcmp(part[2], "s3", 2) != 0 || len[3] == 0 || len[4] == 0 ||
        len[5] != 11 || memcmp(part[5], "accesspoint", 11) != 0)
        return not_an_access_point(url, e);
    s->access_point = true;
    snprintf(s->region, sizeof s->region, "%.*s", len[3], part[3]);
    if (asprintf(&s->bucket, "%.*s-%.*s", (int)field(at), at, len[4], part[4]) < 0)
        s->bucket = NULL;
    s->shown = strndup(url, (size_t)(at - url) + field(at));
    at += field(at);
    *key = strdup(at + (*at == '/'));
    if (!s->bucket || !s->shown || !*key)
        return err_nomem(e);
    return s3_region_is_safe(s->region) && s3_name_is_label(s->bucket)
               ? 0
               : not_an_access_point(url, e);
}

/*
 * "use1-az4" is in us-east-1: a continent or country, a direction, a number. What is not
 * called like that (Local Zones) is of the region that the user has set.
 */
static void region_of_zone(const char *zone, char region[S3_REGION_SIZE])
{
    static const struct {
        const char *short_name, *name;
    } directions[] = {{"ne", "northeast"}, {"nw", "northwest"}, {"se", "southeast"},
                      {"sw", "southwest"}, {"n", "north"},      {"s", "south"},
                      {"e", "east"},       {"w", "west"},       {"c", "central"}};
    const char *dash = strchr(zone, '-'), *at = zone + 2;
    size_t digits;

    if (!dash || dash - zone < 4 || strncmp(dash, "-az", 3) != 0)
        return;
    for (size_t i = 0; i < ARRAY_SIZE(directions); i++) {
        size_t len = strlen(directions[i].short_name);

        if (strncmp(at, directions[i].short_name, len) != 0)
            continue;
        digits = strspn(at + len, "0123456789");
        if (digits && at + len + digits == dash)
            snprintf(region, S3_REGION_SIZE, "%.2s-%s-%.*s", zone, directions[i].name,
                     (int)digits, at + len);
        return;
    }
}

/* How long the end of a directory bucket's name is, or of its access point's; 0: none. */
static size_t directory_end(const char *bucket)
{
    static const char *const ends[] = {"--x-s3", "--xa-s3"};

    for (size_t i = 0; i < ARRAY_SIZE(ends); i++)
        if (ends_with(bucket, ends[i]))
            return strlen(ends[i]);
    return 0;
}

/* "NAME--ZONE" and an end: the zone is part of the host's name. */
static int take_zone(struct s3_name *s, size_t end, struct err *e)
{
    size_t len = strlen(s->bucket) - end, at = len;

    while (at >= 2 && memcmp(s->bucket + at - 2, "--", 2) != 0)
        at--;
    if (!s3_name_is_label(s->bucket) || at < 3 || at == len ||
        len - at >= S3_ZONE_SIZE) {
        err_set(e, EINVAL, "%s: is no directory bucket's name", s->shown);
        return err_hint(e, "it is NAME--ZONE--x-s3, as in runs--usw2-az1--x-s3");
    }
    snprintf(s->zone, sizeof s->zone, "%.*s", (int)(len - at), s->bucket + at);
    region_of_zone(s->zone, s->region);
    return 0;
}

static int take_bucket(struct s3_name *s, const char *url, char **key, struct err *e)
{
    const char *name = strstr(url, "://") + 3, *slash;
    size_t len = strcspn(name, "/"), end;

    slash = name + len + (name[len] == '/');
    s->bucket = strndup(name, len);
    *key = strdup(slash);
    if (!s->bucket || !*key ||
        asprintf(&s->shown, "%s://%s", s->google ? "gs" : "s3", s->bucket) < 0) {
        s->shown = NULL;
        return err_nomem(e);
    }
    end = s->google ? 0 : directory_end(s->bucket);
    if (end)
        return take_zone(s, end, e);
    if (!bucket_is_safe(s->bucket))
        return err_set(e, EINVAL, "%s: is no bucket's name", s->shown);
    return 0;
}

int s3_name_parse(const char *url, struct s3_name *out, char **key, struct err *e)
{
    const char *name = strstr(url, "://");
    int rc;

    *out = (struct s3_name){0};
    *key = NULL;
    if (!name)
        return err_set(e, EINVAL, "%s: is no URL of a bucket", url);
    out->google = strncasecmp(url, "gs:", 3) == 0;
    rc = !out->google && strncmp(name + 3, "arn:", 4) == 0
             ? take_access_point(out, url, key, e)
             : take_bucket(out, url, key, e);
    if (rc < 0)
        return rc;
    for (size_t n = strlen(*key); n && (*key)[n - 1] == '/';)
        (*key)[--n] = '\0';
    return 0;
}

void s3_name_release(struct s3_name *n)
{
    free(n->bucket);
    free(n->shown);
}
