/* SPDX-License-Identifier: MIT */
/* remote/http_text.c - URLs and dates as text. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "remote/http.h"

const char *http_url_user(const char *url)
{
    const char *host = strstr(url, "://"), *at;

    if (!host)
        return NULL;
    host += 3;
    at = memrchr(host, '@', strcspn(host, "/?#"));
    if (at && strncasecmp(url, "hf:", 3) == 0 &&
        !memchr(host, ':', (size_t)(at - host)))
        return NULL;
    return at;
}

int http_url_shown(const char *url, struct buf *out)
{
    const char *host = strstr(url, "://"), *at = http_url_user(url);

    if (!host)
        return buf_adds(out, url);
    host += 3;
    buf_add(out, url, (size_t)(host - url));
    if (at)
        host = at + 1;
    return buf_add(out, host, strcspn(host, "?#"));
}

static bool is_plain(char c, bool slash)
{
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
           c == '-' || c == '.' || c == '_' || c == '~' || (slash && c == '/');
}

int http_encode(const char *text, bool slash, struct buf *out)
{
    for (; *text; text++)
        if (is_plain(*text, slash))
            buf_addc(out, *text);
        else
            buf_addf(out, "%%%02X", (unsigned)(unsigned char)*text);
    return buf_failed(out);
}

static int hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

int http_decode(const char *text, size_t len, struct buf *out)
{
    for (size_t i = 0; i < len; i++) {
        int hi = -1, lo = -1;

        if (text[i] != '%') {
            if (text[i] == '\0')
                return -EINVAL;
            buf_addc(out, text[i]);
            continue;
        }
        if (len - i > 2) {
            hi = hex(text[i + 1]);
            lo = hex(text[i + 2]);
        }
        if (hi < 0 || lo < 0 || (hi == 0 && lo == 0))
            return -EINVAL;
        buf_addc(out, (char)(hi * 16 + lo));
        i += 2;
    }
    return buf_failed(out);
}

static bool fields_sane(const struct tm *t)
{
    return t->tm_year >= 0 && t->tm_year < 8100 && t->tm_mday >= 1 &&
           t->tm_mday <= 31 && t->tm_mon >= 0 && t->tm_mon < 12 && t->tm_hour >= 0 &&
           t->tm_hour < 24 && t->tm_min >= 0 && t->tm_min < 60 && t->tm_sec >= 0 &&
           t->tm_sec <= 60;
}

/*
 * RFC 9110, 5.6.7: the form that is to be sent, and two old ones that must be read, of which
 * one has years of two digits. The names are English everywhere.
 */
static bool parse_http_date(const char *text, struct tm *t)
{
    static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    char month[4] = "";
    const char *at;

    if (sscanf(text, "%*3s, %2d %3s %4d %2d:%2d:%2d GMT", &t->tm_mday, month,
               &t->tm_year, &t->tm_hour, &t->tm_min, &t->tm_sec) != 6 &&
        sscanf(text, "%*3s %3s %2d %2d:%2d:%2d %4d", month, &t->tm_mday, &t->tm_hour,
               &t->tm_min, &t->tm_sec, &t->tm_year) != 6) {
        if (sscanf(text, "%*[A-Za-z], %2d-%3s-%2d %2d:%2d:%2d GMT", &t->tm_mday, month,
                   &t->tm_year, &t->tm_hour, &t->tm_min, &t->tm_sec) != 6)
            return false;
        t->tm_year += t->tm_year < 70 ? 2000 : 1900;
    }
    if (strlen(month) != 3)
        return false;
    at = strstr(months, month);
    if (!at || (at - months) % 3)
        return false;
    t->tm_mon = (int)(at - months) / 3;
    t->tm_year -= 1900;
    return true;
}

/* "Z", "+02:00", "-0730", "+02" or nothing: seconds ahead of UTC. */
static bool parse_zone(const char *text, int *seconds)
{
    unsigned hours = 0, minutes = 0;
    int end = 0;

    *seconds = 0;
    if (*text != '+' && *text != '-')
        return true;
    if (sscanf(text + 1, "%2u%n", &hours, &end) != 1)
        return false;
    end += text[1 + end] == ':';
    if (text[1 + end] && sscanf(text + 1 + end, "%2u", &minutes) != 1)
        return false;
    if (hours >= 24 || minutes >= 60)
        return false;
    *seconds = (int)(hours * 60 + minutes) * (*text == '-' ? -60 : 60);
    return true;
}

/* "2024-05-01T12:00:00.000Z", as listings of S3 and the Hub have it; commands for keys have zones. */
static bool parse_iso_date(const char *text, struct tm *t, int *ahead)
{
    int end = 0;

    if (sscanf(text, "%4d-%2d-%2dT%2d:%2d:%2d%n", &t->tm_year, &t->tm_mon, &t->tm_mday,
               &t->tm_hour, &t->tm_min, &t->tm_sec, &end) != 6)
        return false;
    t->tm_year -= 1900;
    t->tm_mon -= 1;
    text += end;
    if (*text == '.')
        text += 1 + strspn(text + 1, "0123456789");
    return parse_zone(text, ahead);
}

time_t http_date(const char *text)
{
    struct tm t = {0};
    int ahead = 0;

    if (!parse_http_date(text, &t)) {
        t = (struct tm){0};
        if (!parse_iso_date(text, &t, &ahead))
            return 0;
    }
    return fields_sane(&t) ? timegm(&t) - ahead : 0;
}
