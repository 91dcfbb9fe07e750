/* SPDX-License-Identifier: MIT */
/* remote/gs_token.c - what lets requests into Google's storage: a token, or HMAC keys. */
#include "remote/gs_token.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/err.h"
#include "base/log.h"
#include "remote/gs_account.h"
#include "remote/http.h"

enum {
    AHEAD_S = 60, /* the metadata server makes a new one 4 minutes before the end */
    ASK_S = 3,    /* for an answer of this machine's host */
    MAX_ANSWER = 1 << 16,
};

struct gs_token {
    struct http *http; /* borrowed */
    /* A token of the environment, which cannot be renewed; "": none is to be used. */
    char *given;
    char *file;           /* of credentials, or NULL */
    struct aws_keys keys; /* HMAC keys of the environment */

    pthread_mutex_t lock;
    /* guarded by lock: of the file or the instance; "" when there is none */
    char *token;
    time_t expires;
};

static const char *set_variable(const char *name)
{
    const char *value = getenv(name);

    return value && value[0] ? value : NULL;
}

/*
 * The file that GOOGLE_APPLICATION_CREDENTIALS names, or the one that gcloud's login left
 * (google-auth's _default.py). That is nothing for an emulator, which nobody has named.
 */
static int take_file(struct gs_token *t, struct err *e)
{
    const char *path = set_variable("GOOGLE_APPLICATION_CREDENTIALS");
    const char *home = set_variable("HOME"), *folder = set_variable("CLOUDSDK_CONFIG");
    CLEANUP(buf_release) struct buf known = {0};

    if (!path && !set_variable("STORAGE_EMULATOR_HOST") && (folder || home)) {
        buf_addf(&known, "%s%s/application_default_credentials.json",
                 folder ? folder : home, folder ? "" : "/.config/gcloud");
        if (buf_failed(&known))
            return err_nomem(e);
        path = access(known.data, F_OK) == 0 ? known.data : NULL;
    }
    t->file = path ? strdup(path) : NULL;
    return path && !t->file ? err_nomem(e) : 0;
}

static int take_environment(struct gs_token *t, struct err *e)
{
    const char *token = set_variable("GOOGLE_OAUTH_ACCESS_TOKEN");
    const char *id = set_variable("GS_ACCESS_KEY_ID");
    const char *secret = set_variable("GS_SECRET_ACCESS_KEY");
    const char *unsigned_ones = set_variable("GS_NO_SIGN_REQUEST");

    if (unsigned_ones && strcasecmp(unsigned_ones, "NO") != 0) {
        t->given = strdup("");
        return t->given ? 0 : err_nomem(e);
    }
    if (!token)
        token = set_variable("CLOUDSDK_AUTH_ACCESS_TOKEN");
    if (token) {
        t->given = strdup(token);
        return t->given ? 0 : err_nomem(e);
    }
    if (!id != !secret)
        return err_set(e, EACCES,
                       "of GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY only "
                       "one is set");
    if (id) {
        t->keys.id = strdup(id);
        t->keys.secret = strdup(secret);
        return t->keys.id && t->keys.secret ? 0 : err_nomem(e);
    }
    return take_file(t, e);
}

int gs_token_new(struct http *http, struct gs_token **out, struct err *e)
{
    struct gs_token *t = calloc(1, sizeof *t);

    if (!t)
        return err_nomem(e);
    t->http = http;
    pthread_mutex_init(&t->lock, NULL);
    if (take_environment(t, e) < 0) {
        gs_token_free(t);
        return -e->code;
    }
    *out = t;
    return 0;
}

static void wipe(char *text)
{
    if (text)
        explicit_bzero(text, strlen(text));
    free(text);
}

void gs_token_free(struct gs_token *t)
{
    if (!t)
        return;
    pthread_mutex_destroy(&t->lock);
    aws_keys_release(&t->keys);
    wipe(t->given);
    free(t->file);
    wipe(t->token);
    free(t);
}

/* "" when no metadata server is there, or the instance has no account. */
static int ask_instance(const struct gs_token *t, char **token, time_t *expires,
                        struct err *e)
{
    static const char *const headers[] = {"Metadata-Flavor: Google", NULL};
    const char *host = set_variable("GCE_METADATA_HOST"), *off = getenv("NO_GCE_CHECK");
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(buf_release) struct buf url = {0};
    struct http_request r = {.what = "the instance's metadata",
                             .headers = headers,
                             .max = MAX_ANSWER,
                             .flags =
                                 HTTP_NO_REDIRECT | HTTP_ANY_STATUS | HTTP_NO_PROXY,
                             .deadline_s = ASK_S};
    struct err nobody = {0};
    const char *flavour;
    int rc = -ENOENT;

    buf_addf(&url,
             "http://%s/computeMetadata/v1/instance/service-accounts/default/token",
             host ? host : "169.254.169.254");
    if (buf_failed(&url))
        return err_nomem(e);
    r.url = url.data;
    if (!off || strcasecmp(off, "true") != 0)
        rc = http_do(t->http, &r, &answer, &nobody);
    if (rc == -EINTR || rc == -ENOMEM)
        return err_set(e, -rc, "%s", nobody.text);
    flavour = rc == 0 ? http_answer_header(&answer, "Metadata-Flavor") : NULL;
    if (answer.status == 200 && flavour && strcasecmp(flavour, "Google") == 0)
        return gs_token_take(&answer, token, expires, e) < 0
                   ? err_wrap(e, "the instance's metadata")
                   : 0;
    *token = strdup("");
    *expires = 0;
    return *token ? 0 : err_nomem(e);
}

/* Asks without holding the lock: two threads may both ask, which does no harm. */
static int renew(struct gs_token *t, bool *changed, struct err *e)
{
    char *token = NULL;
    time_t expires;
    int rc = t->file ? gs_account_token(t->http, t->file, &token, &expires, e)
                     : ask_instance(t, &token, &expires, e);

    if (rc < 0)
        return rc;
    pthread_mutex_lock(&t->lock);
    *changed = !t->token || strcmp(t->token, token) != 0;
    wipe(t->token);
    t->token = token;
    t->expires = expires;
    pthread_mutex_unlock(&t->lock);
    return 0;
}

int gs_token_get(struct gs_token *t, struct buf *header, struct aws_keys *keys,
                 struct err *e)
{
    bool due, changed;

    if (t->keys.id) {
        *keys = t->keys;
        return 0;
    }
    if (t->given && !t->given[0])
        return 0;
    if (t->given)
        return buf_addf(header, "Bearer %s", t->given) < 0 ? err_nomem(e) : 0;
    pthread_mutex_lock(&t->lock);
    due = !t->token || (t->expires && time(NULL) + AHEAD_S >= t->expires);
    pthread_mutex_unlock(&t->lock);
    if (due)
        TRY(renew(t, &changed, e));
    pthread_mutex_lock(&t->lock);
    if (t->token && t->token[0])
        buf_addf(header, "Bearer %s", t->token);
    pthread_mutex_unlock(&t->lock);
    return buf_failed(header) ? err_nomem(e) : 0;
}

bool gs_token_renew(struct gs_token *t)
{
    struct err e = {0};
    bool changed = false;

    if (t->given || t->keys.id)
        return false;
    if (renew(t, &changed, &e) < 0 && e.code != EINTR)
        log_err(LOG_REMOTE, &e);
    return changed;
}
