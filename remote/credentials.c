/* SPDX-License-Identifier: MIT */
/* remote/credentials.c - the keys that AWS requests are signed with, and their renewal. */
#include "remote/credentials.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "base/err.h"
#include "remote/aws_config.h"
#include "remote/credential_sources.h"
#include "remote/http.h"
#include "remote/kept_keys.h"

struct credentials {
    struct http *http; /* borrowed */
    char *region;      /* NULL: none */
    struct kept_keys *kept;
};

/* ---- settings ---- */

static const char *set_variable(const char *name)
{
    const char *value = getenv(name);

    return value && value[0] ? value : NULL;
}

const char *aws_profile(void)
{
    const char *name = set_variable("AWS_PROFILE");

    if (!name)
        name = set_variable("AWS_DEFAULT_PROFILE");
    return name ? name : "default";
}

const char *aws_region(const struct aws_config *config)
{
    const char *name = set_variable("AWS_REGION");

    if (!name)
        name = set_variable("AWS_DEFAULT_REGION");
    return name ? name : aws_config_get(config, aws_profile(), "region");
}

static bool is_yes(const char *value)
{
    return value && (strcmp(value, "1") == 0 || strcasecmp(value, "true") == 0 ||
                     strcasecmp(value, "yes") == 0);
}

/* The environment's word goes before the profile's (botocore's args.py). */
static bool ignores_endpoints(const struct aws_config *config)
{
    const char *said = set_variable("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS");

    if (!said)
        said = aws_config_get(config, aws_profile(), "ignore_configured_endpoint_urls");
    return said && strcasecmp(said, "true") == 0;
}

const char *aws_endpoint(const struct aws_config *config, const char *service)
{
    CLEANUP(buf_release) struct buf variable = {0};
    const char *url;

    if (ignores_endpoints(config))
        return NULL;
    buf_adds(&variable, "AWS_ENDPOINT_URL_");
    for (const char *p = service; *p; p++)
        buf_addc(&variable, (char)toupper((unsigned char)*p));
    url = buf_failed(&variable) ? NULL : set_variable(variable.data);
    if (!url)
        url = set_variable("AWS_ENDPOINT_URL");
    if (!url)
        url = aws_config_service_endpoint(config, aws_profile(), service);
    return url ? url : aws_config_get(config, aws_profile(), "endpoint_url");
}

/* ---- the chain ---- */

static int keys_of_profile(const struct key_context *k, const char *profile,
                           struct aws_keys *out, struct err *e)
{
    static const char id[] = "aws_access_key_id";
    const struct aws_config *c = k->config;
    const struct aws_keys keys = {
        /* borrowed: copied below, never written */
        .id = (char *)(uintptr_t)aws_config_get(c, profile, id),
        .secret = (char *)(uintptr_t)aws_config_get_beside(c, profile,
                                                           "aws_secret_access_key", id),
        .token = (char *)(uintptr_t)aws_config_get_beside(c, profile,
                                                          "aws_session_token", id)};

    if (!keys.id)
        return 0;
    if (!keys.secret)
        return err_set(e, EACCES, "aws_access_key_id without aws_secret_access_key");
    TRY(aws_keys_copy(&keys, out, e));
    return 1;
}

static int process_of_profile(const struct key_context *k, const char *profile,
                              struct aws_keys *out, struct err *e)
{
    const char *command = aws_config_get(k->config, profile, "credential_process");

    return command ? keys_from_process(command, out, e) : 0;
}

/*
 * A sign-in that only the aws command does must not turn into other keys, or none: a profile
 * with one of `settings` is refused.
 */
static int refuse_sign_in(const struct key_context *k, const char *const *settings,
                          struct err *e)
{
    const char *profile = aws_profile();

    for (; *settings; settings++) {
        if (!aws_config_get(k->config, profile, *settings))
            continue;
        err_set(e, EACCES,
                "profile %s has %s: unshard does not sign in with AWS SSO and does not "
                "assume roles of a profile",
                profile, *settings);
        return err_hint(
            e,
            "set AWS_PROFILE to a profile with credential_process = aws configure "
            "export-credentials --profile %s; or run: eval \"$(aws configure "
            "export-credentials --profile %s --format env)\"",
            profile, profile);
    }
    return 0;
}

/* As in botocore, a profile's role goes before all else that it has, SSO before its keys. */
static int refuse_role(const struct key_context *k, struct aws_keys *out, struct err *e)
{
    static const char *const settings[] = {"role_arn", "source_profile",
                                           "credential_source", NULL};

    (void)out;
    return aws_config_get(k->config, aws_profile(), "web_identity_token_file")
               ? 0
               : refuse_sign_in(k, settings, e);
}

static int refuse_sso(const struct key_context *k, struct err *e)
{
    static const char *const settings[] = {"sso_session", "sso_start_url",
                                           "sso_account_id", "sso_role_name", NULL};

    return refuse_sign_in(k, settings, e);
}

/* Web identity, keys, command, as this profile has them. */
static int keys_in_profile(const struct key_context *k, const char *profile,
                           struct aws_keys *out, struct err *e)
{
    const char *token = aws_config_get(k->config, profile, "web_identity_token_file");
    int rc;

    if (token)
        return keys_from_web_identity(
            k, aws_config_get(k->config, profile, "role_arn"),
            aws_config_get(k->config, profile, "role_session_name"), token, out, e);
    rc = keys_of_profile(k, profile, out, e);
    return rc == 0 ? process_of_profile(k, profile, out, e) : rc;
}

static int keys_from_profile(const struct key_context *k, struct aws_keys *out,
                             struct err *e)
{
    const char *profile = aws_profile();
    int rc;

    if (strcmp(profile, "default") != 0 &&
        !aws_config_has_profile(k->config, profile)) {
        err_set(e, ENOENT, "there is no profile %s", profile);
        return err_hint(e, "see ~/.aws/config and ~/.aws/credentials, or what "
                           "AWS_CONFIG_FILE names");
    }
    TRY(refuse_sso(k, e));
    rc = keys_in_profile(k, profile, out, e);
    return rc < 0 ? err_wrap(e, "profile %s", profile) : rc;
}

static int keys_from_identity(const struct key_context *k, struct aws_keys *out,
                              struct err *e)
{
    const char *file = set_variable("AWS_WEB_IDENTITY_TOKEN_FILE");

    return file ? keys_from_web_identity(k, getenv("AWS_ROLE_ARN"),
                                         getenv("AWS_ROLE_SESSION_NAME"), file, out, e)
                : 0;
}

/* Keys with id NULL when nobody has any. */
static int fetch(void *user, struct aws_keys *out, struct err *e)
{
    const struct credentials *c = user;
    static int (*const places[])(const struct key_context *, struct aws_keys *,
                                 struct err *) = {
        refuse_role, keys_from_identity, keys_from_profile, keys_from_container,
        keys_from_instance};
    CLEANUP(aws_config_freep) struct aws_config *config = NULL;
    struct key_context k = {.http = c->http, .region = c->region};
    int rc;

    *out = (struct aws_keys){0};
    if (is_yes(getenv("AWS_NO_SIGN_REQUEST")))
        return 0;
    rc = keys_from_environment(out, e);
    if (rc == 0)
        rc = aws_config_load(&config, e);
    k.config = config;
    for (size_t i = 0; rc == 0 && i < ARRAY_SIZE(places); i++)
        rc = places[i](&k, out, e);
    if (rc < 0)
        aws_keys_release(out);
    return MIN(rc, 0);
}

int credentials_new(struct http *http, const char *region, struct credentials **out,
                    struct err *e)
{
    struct credentials *c = calloc(1, sizeof *c);

    if (!c || (region && !(c->region = strdup(region))) ||
        !(c->kept = kept_keys_new(fetch, c))) {
        credentials_free(c);
        return err_nomem(e);
    }
    c->http = http;
    *out = c;
    return 0;
}

void credentials_free(struct credentials *c)
{
    if (!c)
        return;
    kept_keys_free(c->kept);
    free(c->region);
    free(c);
}

int credentials_get(struct credentials *c, struct aws_keys *out, struct err *e)
{
    return kept_keys_get(c->kept, out, e);
}

bool credentials_renew(struct credentials *c)
{
    return kept_keys_renew(c->kept);
}
