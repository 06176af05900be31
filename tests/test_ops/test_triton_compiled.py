# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The Triton kernels compiled for GPUs, none of which has to be here: what the code is like."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec('triton') is None, reason='triton is not installed')

DTYPES = dict(
    uint8='u8', int8='i8', int16='i16', uint16='u16', int32='i32', int64='i64', float16='fp16',
    bfloat16='bf16', float32='fp32', float64='fp64',
)  # fmt: skip
TARGETS = (80, 90)
# What is a multiple of 16 in the common cases: a padded batch's sizes, an image's where it is one.
OUT = ('out_n', 'out_c', 'out_t', 'out_h', 'width')
IMAGE = ('image_n', 'image_c', 'image_t', 'image_h', 'image_width')


def variant(kind, normalize=True):
    """Kernel, its constants, and the arguments that are multiples of 16 and those that are 1."""
    from mmprefetch.ops import triton

    if kind.startswith('flat'):
        constants = dict(NORMALIZE=normalize, BLOCK=triton._BLOCK)
        return triton._flat, constants, () if kind == 'flat, odd' else ('distance', 'plane'), ()
    tile = dict(FIELDS=triton._FIELDS, ROWS=triton._ROWS, COLUMNS=triton._COLUMNS)
    constants = dict(STACKED=kind != 'ragged', NORMALIZE=normalize, **tile)
    if kind == 'ragged':
        return triton._tiles, constants, (*OUT, *IMAGE), ('out_w',)
    if kind == 'strided':
        return triton._tiles, constants, (), ()
    return triton._tiles, constants, (*OUT, *IMAGE), ('out_w', 'image_w')


def compiled(target, dtype, kernel, constants, multiples, ones):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants = {**constants, **dict.fromkeys(ones, 1)}
    pointers = dict.fromkeys(('mean', 'std', 'out'), '*fp32')
    pointers.update(origin=f'*{DTYPES[dtype]}', table='*i64')
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = 'constexpr' if name in constants else pointers.get(name, 'i32')
        if name in pointers or name in multiples:
            attributes[index,] = [['tt.divisibility', 16]]
    signature |= {'pad_value': 'fp32'} if 'pad_value' in signature else {}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return compile(source, target=GPUTarget('cuda', target, 32), options=dict(num_warps=4))


def instructions(made, tmp_path):
    """The machine code, by Triton's own disassembler."""
    file = tmp_path / 'kernel.cubin'
    file.write_bytes(made.asm['cubin'])
    tool = Path(find_spec('triton').origin).parent / 'backends' / 'nvidia' / 'bin' / 'cuobjdump'
    if not tool.exists():
        pytest.skip('this triton brings no cuobjdump')
    text = subprocess.run([tool, '-sass', file], capture_output=True, text=True, check=True).stdout
    return re.findall(r'^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]+)', text, re.M)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('target', TARGETS)
def test_every_variant_compiles(target, dtype):
    for kind in ('flat', 'flat, odd', 'padded', 'ragged', 'strided'):
        made = compiled(target, dtype, *variant(kind))
        assert 'div.rn.f32' in made.asm['ptx'] and 'div.full' not in made.asm['ptx']
    assert 'div' not in compiled(target, dtype, *variant('flat', normalize=False)).asm['ptx']
    compiled(target, dtype, *variant('ragged', normalize=False))


# Values of a thread, and the most instructions that there may be for each, counted with the way out
# of the division for numbers near the ends of the range, which is hardly ever taken.
BOUNDS = {'flat': (16, 36), 'padded': (16, 44), 'ragged': (16, 56)}


@pytest.mark.parametrize('kind', BOUNDS)
@pytest.mark.parametrize('target', TARGETS)
def test_code_of_the_common_variants(target, kind, tmp_path):
    code = instructions(compiled(target, 'uint8', *variant(kind)), tmp_path)
    values, most = BOUNDS[kind]
    assert sum(name.startswith('FCHK') for name in code) == values  # one for each division
    assert len(code) / values <= most
    stores = {name for name in code if name.startswith('STG')}
    assert stores == {'STG.E.128'}
    if kind != 'ragged':  # whose images begin anywhere
        assert 'LDG.E.128' in code and not any('U8' in name for name in code)
