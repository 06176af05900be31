# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The tools that measure: what they run and print, and what is an error."""

import re
import xml.etree.ElementTree as ElementTree
from functools import partial

import benchmark
import benchmark_engine
import benchmark_overlap
import benchmark_preprocess
import benchmark_preprocess_lines
import draw_timeline
import gpu_check_compare
import pytest
import torch
from mmengine.model import ImgDataPreprocessor
from toys import same

from mmprefetch.engine.snapshot import BatchSnapshot

SHORT = ('--steps', 1, '--depths', 2, '--rounds', 2, '--iterations', 20)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What takes its time on purpose takes less of it."""
    monkeypatch.setattr(benchmark_overlap, 'SLOW', 2)
    monkeypatch.setattr(benchmark_overlap, 'FAST', 1)
    monkeypatch.setattr(benchmark_overlap, 'WARM_UP', 1)


def test_engine_prints_command_machine_and_all_tables(call_main, capsys, monkeypatch):
    monkeypatch.setattr(benchmark_engine, 'PROGRESS_S', 0)
    assert call_main(benchmark, 'engine', *SHORT) == 0
    printed = capsys.readouterr().out
    assert printed.startswith('command: python tools/benchmark.py engine --steps 1 --depths 2')
    assert f'torch {torch.__version__}' in printed
    for split in ('train', 'val'):
        for loop in ('stock', 'depth 2'):
            row = rf'^{split} +\d+ +\d+ +\d+ +{loop} +\d+\.\d +\d+\.\d+$'
            assert len(re.findall(row, printed, re.M)) == 3
    for name in ('host', 'accelerator'):
        assert re.search(rf'^collect, {name} +\d+\.\d+ ms +\d+\.\d+ x cast_data$', printed, re.M)
        assert re.search(rf'^{name}( +\d+\.\d)' + r'{2} +\d+\.\d+ x$', printed, re.M)
        assert f'  {name}: 20 of 20 batches' in printed
    assert [float(bound) for bound in re.findall(r'wanted: at most (\S+) x', printed)] == [
        benchmark_overlap.OVERLAP_WANTED,
        benchmark_engine.COST_WANTED,
        benchmark_engine.MEMORY_WANTED,
    ]


def test_engine_does_not_take_work_that_is_done_again_for_collect(monkeypatch):
    monkeypatch.setattr(BatchSnapshot, 'changed', lambda snapshot: True)
    with pytest.raises(RuntimeError, match='not what the model was given'):
        benchmark_engine.cost(1)


@pytest.mark.parametrize('split', ['train', 'val'])
def test_a_batch_out_of_order_is_an_error(monkeypatch, split):
    get = benchmark_overlap.TimedDataset.__getitem__
    monkeypatch.setattr(
        benchmark_overlap.TimedDataset, '__getitem__', lambda self, index: get(self, index ^ 1)
    )
    with pytest.raises(RuntimeError, match=r'the model saw batches \[1, 0'):
        benchmark_overlap.run(dict(load=1, preprocess=1, step=1), 4, 2, 1, split)


def test_engine_refuses_nothing_to_do(call_main, capsys):
    with pytest.raises(SystemExit):
        call_main(benchmark, 'engine', '--iterations', 0)
    assert '--iterations must be at least 1, got 0' in capsys.readouterr().err


def test_preprocess_is_the_other_part(call_main, capsys, monkeypatch):
    asked = []
    monkeypatch.setitem(benchmark.PARTS, 'preprocess', asked.append)
    assert call_main(benchmark, 'preprocess', '--rounds', 1) == 0
    assert asked == [['--rounds', '1']]


@pytest.mark.parametrize('wanted', [0, float('inf')])
def test_preprocess_prints_a_line_for_each_contender(call_main, capsys, monkeypatch, wanted):
    shapes = [(3, 8, 8), (3, 6, 9)]
    table = [
        partial(
            benchmark_preprocess_lines.preprocessor_line,
            'two images',
            ImgDataPreprocessor,
            dict(bgr_to_rgb=True, pad_size_divisor=4),
            shapes,
            wanted,
        )
    ]
    monkeypatch.setattr(benchmark_preprocess, 'lines', lambda: table)
    options = ('--threads', 1, '--rounds', 1, '--processes', 2)
    assert call_main(benchmark, 'preprocess', *options) == 0  # a ratio decides nothing
    printed, progress = capsys.readouterr()
    row = r'^two images, ImgDataPreprocessor +\d+\.\d\d +\d+ +\d+\.\d\d +\d+\.\d x +\d+\.\d\d .* x'
    assert re.search(row + (r'   wanted inf x$' if wanted else '$'), printed, re.M)
    assert re.search(r'^channel order .*: image\[\[2, 1, 0\]\] +\d', printed, re.M)
    assert re.search(r'^took \d+ s$', printed, re.M) and progress == '1 of 1 lines\n'


def test_preprocess_fails_where_a_result_differs(call_main, capsys, monkeypatch):
    line = partial(benchmark_preprocess_lines.preprocessor_line, 'x', Wrong, {}, [(3, 4, 4)], 1)
    monkeypatch.setattr(benchmark_preprocess, 'lines', lambda: [line])
    options = ('--threads', 1, '--rounds', 1, '--processes', 1)
    assert call_main(benchmark, 'preprocess', *options) == 1
    assert 'a result differs: x: not equal to Wrong' in capsys.readouterr().out


def test_processes_are_put_together():
    times = benchmark_preprocess.apart(2, one_process, 3)
    assert times.taken == [[3.0, 3.0], [1.0, 1.0]] and times.faults == [7, 7]
    assert times.medians() == [3e3, 1e3]


def one_process(value):
    return benchmark_preprocess.Times('name', 1, [[float(value)], [1.0]], [7])


def test_what_is_compared_gives_equal_images():
    with pytest.raises(AssertionError, match='not equal to Wrong'):
        benchmark_preprocess_lines.preprocessor_line('x', Wrong, {}, [(3, 4, 4)], 1)
    with pytest.raises(AssertionError):
        benchmark_preprocess_lines.arithmetic_line(
            'x', lambda mean, std: lambda images: images + 0.0
        )


class Wrong(ImgDataPreprocessor):
    def forward(self, data, training=False):
        return dict(inputs=torch.stack(data['inputs']).float() + 1)


def test_preprocess_refuses_nothing_to_do(call_main, capsys):
    with pytest.raises(SystemExit):
        call_main(benchmark, 'preprocess', '--processes', 0)
    assert '--processes must be at least 1, got 0' in capsys.readouterr().err


def test_what_the_cost_is_measured_on():
    batch = benchmark_engine.batch_of_samples()
    assert len(batch['inputs']) == len(batch['data_samples']) == 64
    for sample in batch['data_samples']:
        tensors = [*sample.values(), *sample.instances.values()]
        assert sum(isinstance(value, torch.Tensor) for value in tensors) == 5


@pytest.mark.parametrize('split', ['train', 'val'])
def test_runs_of_the_overlap_hold_every_batch_in_order(split):
    times = dict(load=1, preprocess=1, step=1)
    for depth, workers in ((None, 0), (None, 1), (2, 1)):
        spans = benchmark_overlap.run(times, 4, depth, workers, split)
        assert [len(kind) for kind in spans.values()] == [4, 4, 4]
        for load, preprocess, step in zip(*spans.values(), strict=True):
            assert load.start < load.stop <= preprocess.start < preprocess.stop <= step.start
            assert step.start < step.stop
        assert all(span.on_main for span in spans['step'])
        # The first batch is handed out as it comes.
        assert [span.on_main for span in spans['preprocess']] == [True, *[depth is None] * 3]


def test_an_iteration_of_workers_in_step():
    # Batches come in pairs, and the second of a pair has to wait for nothing.
    stops = [0.0, 0.05, 0.2, 0.25, 0.4, 0.45]
    spans = [benchmark_overlap.Span(stop - 0.05, stop, True) for stop in stops]
    assert benchmark_overlap.iteration_ms(spans, 2) == pytest.approx(100)
    assert benchmark_overlap.iteration_ms(spans[:2]) == pytest.approx(50)


def test_timeline_draws_both_runs(tmp_path, capsys):
    out = tmp_path / 'docs' / 'timeline.svg'
    options = ('--load', 2, '--preprocess', 2, '--step', 4, '--batches', 3)
    assert draw_timeline.main([str(each) for each in ('--out', out, *options)]) == 0
    tree = ElementTree.fromstring(out.read_text())
    namespace = {'svg': 'http://www.w3.org/2000/svg'}
    texts = [text.text for text in tree.iterfind('svg:text', namespace)]
    for batch in range(3):
        assert texts.count(str(batch)) == 2 * 3
    for row, count in (('main thread', 2), ('worker process', 1), ('loader thread', 1)):
        assert texts.count(row) == count
    assert texts[-1].startswith('Drawn by: python tools/draw_timeline.py --out')


def test_waits_are_what_is_left_between_steps():
    steps = [
        draw_timeline.Block('step', 0, (0.5, 1.0)),
        draw_timeline.Block('step', 1, (1.001, 2.0)),
        draw_timeline.Block('step', 2, (2.5, 3.0)),
    ]
    found = [(batch, span) for _, batch, span in draw_timeline.waits(steps)]
    assert found == [(0, (0.0, 0.5)), (2, (2.0, 2.5))]


def test_gpu_comparison_without_a_gpu(call_main, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert call_main(gpu_check_compare) == 2
    assert 'finds no CUDA device' in capsys.readouterr().out


def test_contenders_of_the_gpu_comparison_prepare_the_same():
    cpu = torch.device('cpu')
    for work in (
        gpu_check_compare.classification(cpu, small=True, stacked=True),
        gpu_check_compare.detection(cpu, small=True),
    ):
        gpu_check_compare.check_equal(work, cpu)
        for begin in gpu_check_compare.contenders(work, cpu).values():
            batches = list(begin(gpu_check_compare.Source(work.batches, 5))[0])
            assert len(batches) == 5
            for index, batch in enumerate(batches):
                raw = work.batches[index % 2]
                assert same(batch['data_samples'], raw['data_samples'])


def test_models_of_the_gpu_comparison_learn_from_all_they_are_given():
    cpu = torch.device('cpu')
    work = gpu_check_compare.detection(cpu, small=True)
    trainer = gpu_check_compare.Trainer(work, cpu, amp=False)
    begin = gpu_check_compare.contenders(work, cpu)['stock']
    losses = [
        trainer.step(batch).item() for batch in begin(gpu_check_compare.Source(work.batches, 4))[0]
    ]
    assert len(set(losses)) == 4
    parameters = sum(p.numel() for p in gpu_check_compare.resnet50(1000).parameters())
    assert parameters == 25_557_032


def test_gpu_check_says_what_it_needs(run_script, tmp_path):
    done = run_script('gpu_check.sh', tmp_path / 'none')
    assert done.returncode == 64 and 'is not a folder' in done.stderr
    done = run_script('gpu_check.sh', '--unknown')
    assert done.returncode == 64 and done.stderr.startswith('usage: ')
    done = run_script('gpu_check.sh', CUDA_VISIBLE_DEVICES='')
    assert done.returncode == 2 and 'no CUDA device' in done.stderr
