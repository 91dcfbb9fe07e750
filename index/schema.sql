-- SPDX-License-Identifier: MIT
-- index/schema.sql - the tables of an index: what the checkpoints of one source contain.
--
-- The file is a cache: whatever is wrong with it, it is deleted and made anew. It also is
-- input that may lie: rows that decide about bytes end in `sum`, a hash of the columns
-- before it (XXH3, see catalog_conn.c), and every value is checked again when it is read.
-- Text is kept as blobs, since names and keys may hold any bytes. A row of a checkpoint has
-- the id (checkpoint << 32) + number. A change here needs a new user_version.

PRAGMA application_id = 0x55465349; -- "UFSI"
PRAGMA user_version = 7;

CREATE TABLE source (
    identity BLOB NOT NULL -- the store's; another one: the file is not for this source
) STRICT;

CREATE TABLE checkpoint (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- below 2^31; a new one where a scan finds something else
    path BLOB NOT NULL,    -- of the directory, relative to the store
    file BLOB NOT NULL,    -- the one file that is the checkpoint, or ''
    format BLOB NOT NULL,  -- the driver's name, '' when none got that far
    framework BLOB,
    version BLOB,          -- of the framework
    topology BLOB,         -- JSON object
    header BLOB,           -- __metadata__ of the model view, JSON object; NULL: the usual one
    step INTEGER,
    adapter INTEGER NOT NULL, -- 1: the model view is adapter_model.safetensors
    error BLOB,            -- why the scan failed; there are no tensors then
    metadata_file BLOB,    -- relative to the store
    mode INTEGER NOT NULL, -- AND of the storage files' permission bits
    uid INTEGER NOT NULL,  -- of the metadata file
    gid INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL, -- of the newest storage file
    tensors INTEGER NOT NULL,
    chunks INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    faults INTEGER NOT NULL, -- tensors that cannot be read
    objects INTEGER NOT NULL,
    files INTEGER NOT NULL,
    model_tensors INTEGER NOT NULL, -- by role
    optimizer_tensors INTEGER NOT NULL,
    other_tensors INTEGER NOT NULL,
    model_bytes INTEGER NOT NULL,
    optimizer_bytes INTEGER NOT NULL,
    other_bytes INTEGER NOT NULL,
    print INTEGER NOT NULL, -- of all that the scan found; 0: it failed
    sum INTEGER NOT NULL,
    names_hash INTEGER NOT NULL, -- of the directory's names and kinds
    dir_dev INTEGER NOT NULL, -- the directory when it was last seen to be unchanged
    dir_ino INTEGER NOT NULL,
    dir_size INTEGER NOT NULL,
    dir_mtime_ns INTEGER NOT NULL,
    dir_ctime_ns INTEGER NOT NULL,
    UNIQUE (path, file)
) STRICT;

CREATE TABLE file (
    id INTEGER PRIMARY KEY, -- number: as chunks name it
    path BLOB NOT NULL,     -- relative to the store
    dev INTEGER NOT NULL,   -- all five 0: missing when scanned
    ino INTEGER NOT NULL,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL,
    mode INTEGER NOT NULL,
    storage INTEGER NOT NULL, -- 1: holds chunks, 0: only watched, 2: full copies
    whole INTEGER NOT NULL,   -- 1: a safetensors file that may be served as it is
    tensors INTEGER NOT NULL, -- that have chunks in it
    sum INTEGER NOT NULL
) STRICT;

CREATE TABLE hidden (
    checkpoint INTEGER NOT NULL,
    name BLOB NOT NULL,    -- in the checkpoint's directory
    part INTEGER NOT NULL, -- 1: a part of a composite
    PRIMARY KEY (checkpoint, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE tensor (
    id INTEGER PRIMARY KEY, -- number: ord, in byte order of name
    key BLOB NOT NULL,      -- in full, as shown
    name BLOB,              -- file name in raw/; NULL: the key
    name_npy BLOB,          -- file name in tensors/; NULL: name and ".npy"
    part BLOB,
    wrapper INTEGER NOT NULL, -- leading bytes of key that a saver put on; 2^30 more where
                              -- wrappers of modules are dropped from the name behind it
    dtype INTEGER NOT NULL, -- enum dtype
    stored INTEGER NOT NULL, -- enum dtype of the pieces: reading casts where it differs
    bits INTEGER NOT NULL,  -- of an element: the order of views
    shape BLOB NOT NULL,    -- varints: number of dimensions, dimensions
    role INTEGER NOT NULL,  -- enum role
    bytes INTEGER NOT NULL,
    chunks INTEGER NOT NULL, -- reported by the driver
    fault BLOB,             -- why it cannot be read
    codec_key BLOB,         -- in the shard; NULL: the key
    attributes BLOB,        -- JSON object
    ino INTEGER NOT NULL,   -- of the raw file
    mode INTEGER NOT NULL,
    uid INTEGER NOT NULL,
    gid INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    single_file INTEGER,    -- all of it is one plain chunk of this file, under this key
    rule INTEGER NOT NULL,  -- number of its row of origin, why it is taken from there; 0: none
    first_file INTEGER,     -- number of the file that its first chunk lies in; NULL: none
    pieces_sum INTEGER NOT NULL, -- XXH3 of pieces
    sum INTEGER NOT NULL,   -- of all above
    pieces BLOB NOT NULL    -- chunks_pack(); empty when the chunks do not cover it
) STRICT;

-- Rows are packed: one for each name would be a third of all that a scan writes.
CREATE TABLE tensor_name (
    checkpoint INTEGER NOT NULL,
    hash INTEGER NOT NULL, -- the first in data
    data BLOB NOT NULL, -- by hash of the file name (and of name_npy where that is cut): 8
                        -- bytes of the hash, 4 of ord, little-endian
    sum INTEGER NOT NULL,
    PRIMARY KEY (checkpoint, hash)
) STRICT, WITHOUT ROWID;

CREATE TABLE tree (
    dir INTEGER NOT NULL, -- (checkpoint << 32) + number: 0 is tree/ itself
    pos INTEGER NOT NULL, -- of the first in data, from 0
    parent INTEGER NOT NULL, -- number
    data BLOB NOT NULL, -- by name: varints of its length and of the child (zigzag: ord of a
                        -- tensor, or minus the number of a directory), and the name
    sum INTEGER NOT NULL,
    PRIMARY KEY (dir, pos)
) STRICT, WITHOUT ROWID;

CREATE TABLE object (
    id INTEGER PRIMARY KEY, -- number: in byte order of key
    key BLOB NOT NULL,
    json BLOB NOT NULL,
    sum INTEGER NOT NULL
) STRICT;

CREATE TABLE warning (
    id INTEGER PRIMARY KEY, -- number: in the order reported
    code BLOB NOT NULL,
    text BLOB NOT NULL
) STRICT;

CREATE TABLE origin (
    id INTEGER PRIMARY KEY, -- number, from 1: as tensors name it
    text BLOB NOT NULL,
    passed INTEGER NOT NULL -- 1: what was passed over as the model, 0: a rule
) STRICT;

CREATE TABLE view (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- below 2^31
    checkpoint INTEGER NOT NULL,
    kind INTEGER NOT NULL,   -- enum view_kind
    prefix INTEGER NOT NULL, -- enum view_prefix
    name BLOB NOT NULL,
    size INTEGER NOT NULL,
    header INTEGER NOT NULL, -- literal bytes at the start
    whole_file INTEGER,      -- number of the file that it is, byte for byte
    fault BLOB,
    ino INTEGER NOT NULL,
    mode INTEGER NOT NULL,
    uid INTEGER NOT NULL,
    gid INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    members INTEGER NOT NULL, -- tensors in it; 0: there is no such file
    sum INTEGER NOT NULL,
    UNIQUE (checkpoint, kind, prefix)
) STRICT;

-- Both: id is (view << 32) + number of the block.
CREATE TABLE view_header (
    id INTEGER PRIMARY KEY,
    data BLOB NOT NULL, -- 64 KiB of the header, the last one less
    sum INTEGER NOT NULL
) STRICT;

CREATE TABLE view_member (
    id INTEGER PRIMARY KEY,
    data BLOB NOT NULL, -- varints: bytes, and ord as a zigzag difference, per member
    sum INTEGER NOT NULL
) STRICT;

-- Ids start at random, so that one of a deleted index is not mistaken for a new one's.
INSERT INTO sqlite_sequence (name, seq)
VALUES ('checkpoint', random() & 0x3fffffff), ('view', random() & 0x3fffffff);
