/* SPDX-License-Identifier: MIT */
/* fs/notify.h - tells systemd (Type=notify) how far the server of a mount is. */
#ifndef UFS_FS_NOTIFY_H
#define UFS_FS_NOTIFY_H

/*
 * Sends "READY=1" or the like to the socket that $NOTIFY_SOCKET names (systemd 252,
 * sd_notify(3)). Does nothing where there is none; nobody is kept from reading when it
 * fails.
 */
void notify_manager(const char *state);

#endif
