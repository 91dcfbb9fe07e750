/* SPDX-License-Identifier: MIT */
/* remote/s3_name.h - what a URL of S3 or Google's storage names: a bucket or access point, a key. */
#ifndef UFS_REMOTE_S3_NAME_H
#define UFS_REMOTE_S3_NAME_H

#include "base/base.h"

struct err;

enum { S3_REGION_SIZE = 64, S3_ZONE_SIZE = 32 };

struct s3_name {
    bool google;
    bool
        access_point; /* `bucket` is NAME-ACCOUNT then, the first part of its host's name */
    char *bucket, *shown;        /* owned */
    char region[S3_REGION_SIZE]; /* where the name tells it; else "" */
    char zone[S3_ZONE_SIZE];     /* of a directory bucket (S3 Express); else "" */
};

/*
 * Takes s3://BUCKET/KEY, gs://BUCKET/KEY or s3://ARN/KEY apart. *key is owned by the caller,
 * literal, without slashes at its end. -EINVAL: no bucket's name; -ENOTSUP: an ARN of
 * something else than an access point of one region. After an error too *out is to be
 * released and *key to be freed.
 *
 * A directory bucket is called NAME--ZONE--x-s3, an access point of one NAME--ZONE--xa-s3;
 * the zone ("usw2-az1") tells the region, but for Local Zones (AWS's user guide, "Directory
 * bucket naming rules", and "AZ IDs" of its global infrastructure).
 */
int s3_name_parse(const char *url, struct s3_name *out, char **key, struct err *e);
void s3_name_release(struct s3_name *n);

/* Can it be a part of a host's name under the certificate for *.s3.REGION...? */
bool s3_name_is_label(const char *name);

/* Letters, digits, '-' and '_', of a length that fits. */
bool s3_region_is_safe(const char *name);

#endif
