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

enum { MAX_ROLES = 4 }; /* source_profile of source_profile of ... */

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

static int keys_of_named_source(const struct key_context *k, const char *source,
                                struct aws_keys *out, struct err *e)
{
    if (strcasecmp(source, "Environment") == 0)
        return keys_from_environment(out, e);
    if (strcasecmp(source, "EcsContainer") == 0)
        return keys_from_container(k, out, e);
    if (strcasecmp(source, "Ec2InstanceMetadata") == 0)
        return keys_from_instance(k, out, e);
    return err_set(e, EINVAL,
                   "credential_source = %s is none of Environment, "
                   "EcsContainer, Ec2InstanceMetadata",
                   source);
}

static int add_role(const struct key_context *k, const char *profile,
                    struct aws_keys *keys, struct err *e)
{
    const struct role role = {
        .arn = aws_config_get(k->config, profile, "role_arn"),
        .session = aws_config_get(k->config, profile, "role_session_name"),
        .external_id = aws_config_get(k->config, profile, "external_id"),
        .seconds = aws_config_get(k->config, profile, "duration_seconds")};
    struct aws_keys got = {0};
    int rc;

    if (aws_config_get(k->config, profile, "mfa_serial")) {
        err_set(e, ENOTSUP, "a role with a second factor (mfa_serial)");
        return err_hint(e, "let a credential_process ask for it");
    }
    rc = keys_from_role(k, &role, keys, &got, e);
    aws_keys_release(keys);
    *keys = got;
    return rc;
}

/* All but roles: web identity, SSO, keys, command, as this profile has them. */
static int plain_profile(const struct key_context *k, const char *profile,
                         struct aws_keys *out, struct err *e)
{
    const char *token = aws_config_get(k->config, profile, "web_identity_token_file");
    int rc;

    if (token)
        return keys_from_web_identity(
            k, aws_config_get(k->config, profile, "role_arn"),
            aws_config_get(k->config, profile, "role_session_name"), token, out, e);
    rc = keys_from_sso(k, profile, out, e);
    if (rc == 0)
        rc = keys_of_profile(k, profile, out, e);
    if (rc == 0)
        rc = process_of_profile(k, profile, out, e);
    return rc;
}

static bool has_keys(const struct key_context *k, const char *profile)
{
    return aws_config_get(k->config, profile, "aws_access_key_id") ||
           aws_config_get(k->config, profile, "aws_secret_access_key");
}

/*
 * Follows source_profile to where keys are, then comes back taking on one role after the
 * other. A profile that names itself uses its own keys, and so does one that another names,
 * whatever role it has too (botocore's _resolve_credentials_from_profile).
 */
static int role_chain(const struct key_context *k, const char *profile,
                      struct aws_keys *out, struct err *e)
{
    const char *roles[MAX_ROLES], *at = profile, *named = NULL;
    size_t n = 0;
    int rc;

    while (aws_config_get(k->config, at, "role_arn") &&
           !aws_config_get(k->config, at, "web_identity_token_file") &&
           !(n > 0 && has_keys(k, at))) {
        const char *next = aws_config_get(k->config, at, "source_profile");

        named = aws_config_get(k->config, at, "credential_source");
        if (n == MAX_ROLES)
            return err_set(e, EINVAL, "more than %d roles one from the other",
                           MAX_ROLES);
        if (!next && !named)
            return err_set(e, EINVAL,
                           "role_arn without source_profile or "
                           "credential_source");
        roles[n++] = at;
        if (named || strcmp(next, at) == 0)
            break;
        at = next;
    }
    rc = named ? keys_of_named_source(k, named, out, e) : plain_profile(k, at, out, e);
    if (rc == 0 && n)
        rc = err_set(e, EACCES, "there are no keys to take on the role with");
    while (rc == 1 && n)
        rc = add_role(k, roles[--n], out, e);
    return rc;
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
    rc = role_chain(k, profile, out, e);
    return rc < 0 ? err_wrap(e, "profile %s", profile) : rc;
}

/* Has the profile a role that is taken on with other keys? It goes before all else of it. */
static int keys_from_role_of_profile(const struct key_context *k, struct aws_keys *out,
                                     struct err *e)
{
    const char *profile = aws_profile();

    if (!aws_config_get(k->config, profile, "role_arn") ||
        aws_config_get(k->config, profile, "web_identity_token_file"))
        return 0;
    return keys_from_profile(k, out, e);
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
        keys_from_role_of_profile, keys_from_identity, keys_from_profile,
        keys_from_container, keys_from_instance};
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
