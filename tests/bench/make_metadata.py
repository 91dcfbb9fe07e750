# SPDX-License-Identifier: MIT
"""Writes a .metadata of torch.distributed.checkpoint with many chunks, without torch.

    make_metadata.py FILE [CHUNKS] [CHUNKS_PER_TENSOR]   writes it (default 1000000, 1000)
    make_metadata.py --load FILE                         times Python's own unpickling

The classes below have the names and the pickled form of the real ones, so the bytes are
what torch 2.15 writes: protocol 4, shapes shared through the memo between chunks and
storage keys.
"""
import pickle
import resource
import sys
import time
import types


def module(name):
    m = sys.modules.setdefault(name, types.ModuleType(name))
    if '.' in name:
        parent, _, leaf = name.rpartition('.')
        setattr(module(parent), leaf, m)
    return m


def define(module_name, name, bases=(), **members):
    members.update(__module__=module_name, __qualname__=name)
    cls = type(name, bases, members)
    setattr(module(module_name), name, cls)
    return cls


BLOB = 14680780  # bytes of a stored zip with a float32 tensor of 512 x 7168 (make_checkpoint.write_blob)
META = 'torch.distributed.checkpoint.metadata'
Size = define('torch', 'Size', (tuple,), __reduce__=lambda self: (Size, (tuple(self),)))
dtype = define('torch', 'dtype', __reduce__=lambda self: self.name)
float32 = module('torch').float32 = dtype()
float32.name = 'float32'
layout = define('torch', 'layout', __reduce__=lambda self: (get_layout, ('torch.strided',)))


def get_layout(name):
    return layout()


get_layout.__module__, get_layout.__qualname__ = 'torch.serialization', '_get_layout'
module('torch.serialization')._get_layout = get_layout
MemFormat = define(META, '_MEM_FORMAT_ENCODING', (int,),
                   __reduce__=lambda self: (MemFormat, (int(self),)))
Metadata = define(META, 'Metadata')
TensorStorage = define(META, 'TensorStorageMetadata')
Chunk = define(META, 'ChunkStorageMetadata')
Index = define(META, 'MetadataIndex', __eq__=lambda a, b: a is b,
               __hash__=lambda self: id(self))
StorageMeta = define(META, 'StorageMeta')
StorageInfo = define('torch.distributed.checkpoint.filesystem', '_StorageInfo')
Properties = define(META, 'TensorProperties', __getstate__=lambda self: self.state,
                    __setstate__=lambda self, state: setattr(self, 'state', state))


def make(cls, **state):
    obj = cls()
    obj.__dict__.update(state)
    return obj


def metadata(chunks, per_tensor):
    tensors, storage, planner = {}, {}, {}
    files = ['__%d_0.distcp' % rank for rank in range(per_tensor)]
    for t in range(chunks // per_tensor):
        fqn = 'model.layers.%d.mlp.experts.%d.weight' % (t // 64, t % 64)
        boxes = []
        for rank in range(per_tensor):
            offset = Size((rank * 512, 0))
            boxes.append(make(Chunk, offsets=offset, sizes=Size((512, 7168))))
            # Ranks send their own copies: the key's text is shared within a rank only.
            key = make(Index, fqn=fqn, index=rank, offset=offset)
            storage[key] = make(StorageInfo, relative_path=files[rank],
                                offset=t * BLOB, length=BLOB)
        properties = Properties()
        properties.state = (float32, layout(), False, MemFormat(0), False)
        tensors[fqn] = make(TensorStorage, properties=properties,
                            size=Size((512 * per_tensor, 7168)), chunks=boxes)
        planner[fqn] = tuple(fqn.split('.'))
    return make(Metadata, state_dict_metadata=tensors, planner_data=planner,
                storage_data=storage, version='1.0.0',
                storage_meta=make(StorageMeta, checkpoint_id='/c', save_id='1',
                                  load_id=None, modules=[]))


def main(args):
    if args[0] == '--load':
        start = time.monotonic()
        with open(args[1], 'rb') as f:
            data = pickle.load(f)
        seconds = time.monotonic() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print('Python: %d chunks in %.2f s, %.0f chunks/s, peak %.0f MiB' % (
            len(data.storage_data), seconds, len(data.storage_data) / seconds, peak))
        return
    chunks = int(args[1]) if len(args) > 1 else 1000000
    per_tensor = int(args[2]) if len(args) > 2 else 1000
    with open(args[0], 'wb') as f:
        pickle.dump(metadata(chunks, per_tensor), f, protocol=4)


if __name__ == '__main__':
    main(sys.argv[1:])
