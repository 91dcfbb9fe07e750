/* SPDX-License-Identifier: MIT */
/* fs/dir.h - listing directories. */
#ifndef UFS_FS_DIR_H
#define UFS_FS_DIR_H

#include "fs/request.h"

int opendir_run(struct request *r, struct err *e);
int readdir_run(struct request *r, struct err *e); /* r->plus: with attributes */

#endif
