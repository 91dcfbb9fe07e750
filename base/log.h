/* SPDX-License-Identifier: MIT */
/* base/log.h - areas and levels, one line an event, on stderr or syslog-like sinks. */
#ifndef UFS_BASE_LOG_H
#define UFS_BASE_LOG_H

#include "base/base.h"

struct err;

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };
enum log_area { LOG_BASE, LOG_REMOTE, LOG_INDEX, LOG_FORMAT, LOG_GPU, LOG_FS, LOG_CLI };

/*
 * Reads a specification "area:level,area:level" or "level" (areas: base remote index
 * format gpu fs cli; levels: error warn info debug). The default is warn. Call before
 * threads start. False when it cannot be read (the good parts are taken).
 */
bool log_configure(const char *spec);

/* Lines go to this descriptor from now on (2 at the start). */
void log_to(int fd);

bool log_enabled(enum log_area area, enum log_level level);

/* One line "unshard: AREA LEVEL: TEXT"; control bytes are escaped. Any thread. */
void log_msg(enum log_area area, enum log_level level, const char *fmt, ...)
    PRINTF(3, 4);

/*
 * The one place where an error is reported. Of those that have one cause (a missing shard of
 * a thousand tensors) the first three are lines of their own, and then the 10th, 100th, ...
 * with the count; the level info gives each. A cause that was quiet for a minute is new.
 */
void log_err(enum log_area area, const struct err *e);

#endif
