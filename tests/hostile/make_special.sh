#!/bin/sh
# SPDX-License-Identifier: MIT
# Special files that cannot live in version control.  usage: make_special.sh DIR CONTROL.safetensors
set -e
mkdir -p "$1"; cd "$1"; C=$2
one() { mkdir -p "$1"; cp "$C" "$1/ok.safetensors"; }
one loop;      ln -s b loop/a.safetensors; ln -s a.safetensors loop/b; ln -s . loop/self
one escape;    ln -s /etc/passwd escape/passwd.safetensors; ln -s ../.. escape/up; ln -s /proc/self/fd escape/fd
one dangling;  ln -s nowhere dangling/x.safetensors
one fifo;      mkfifo fifo/model.safetensors fifo/latest fifo/.metadata fifo/metadata.json
one dirname;   mkdir -p dirname/model.safetensors dirname/latest
one perm;      cp "$C" perm/secret.safetensors; chmod 000 perm/secret.safetensors
one zero;      ln -s /dev/zero zero/zero.safetensors; ln -s /dev/null zero/null.safetensors
one names;     cp "$C" "names/$(printf 'new\nline').safetensors"; cp "$C" "names/$(printf '\377\376').safetensors"; cp "$C" "names/$(printf 'n%.0s' $(seq 1 243)).safetensors"
one deep;      d=deep; for i in $(seq 1 64); do d=$d/d; done; mkdir -p $d; cp "$C" $d/x.safetensors
one hardlink;  ln hardlink/ok.safetensors hardlink/again.safetensors
mkdir -p empty
one sock;      command -v python3 >/dev/null && python3 -c "import socket;s=socket.socket(socket.AF_UNIX);s.bind('sock/model.safetensors')" || true
one sparse;    cp "$C" sparse/big.safetensors; truncate -s 8T sparse/big.safetensors 2>/dev/null || truncate -s 1T sparse/big.safetensors
