#!/bin/sh
# SPDX-License-Identifier: MIT
# Every header compiles alone, and twice: check_headers.sh SOURCE_ROOT COMPILER...
set -u
root=$1
shift
flags="-std=gnu17 -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -Wall -Wextra -Werror"
libs=$(pkg-config --cflags fuse3 libcjson sqlite3 2>/dev/null)
count=0
failed=0
cd "$root" || exit 2
for header in $(find base remote index gpu fs cli -name '*.h' | sort); do
    count=$((count + 1))
    # shellcheck disable=SC2086
    printf '#include "%s"\n#include "%s"\n' "$header" "$header" |
        "$@" -fsyntax-only -x c $flags $libs -I. - || {
        echo "$header does not compile alone" >&2
        failed=$((failed + 1))
    }
done
echo "$count headers, $failed bad"
[ "$count" -gt 0 ] && [ "$failed" -eq 0 ]
