# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Record two short runs on CPU, under mmengine's loop and looking ahead, and draw when what ran.

Loading, preprocessing and the step take known times; the spans drawn are measured.
"""

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from benchmark_overlap import Span, iteration_ms, run

WIDTH, LEFT, RIGHT = 1000, 150, 20
ROW, GAP = 30, 6
COLOURS = dict(load='#8ecae6', preprocess='#ffb703', step='#90be6d', wait='url(#wait)')
STYLE = """
text { font-family: sans-serif; font-size: 12px; fill: #222 }
.heading { font-size: 14px; font-weight: bold }
.number { text-anchor: middle }
.row { text-anchor: end }
.axis { stroke: #bbb; stroke-width: 1 }
.small { font-size: 11px; fill: #555 }
"""


class Block(NamedTuple):
    """A span in a row of the diagram.

    Attributes:
        kind: 'load', 'preprocess', 'step' or 'wait'.
        batch: Its batch.
        span: Start and stop, in seconds from the start of the run.
    """

    kind: str
    batch: int
    span: tuple[float, float]


def blocks(
    spans: dict[str, list[Span]], kind: str, on_main: Collection[bool] = (True, False)
) -> list[Block]:
    """What was done of one kind, counted from the first load.

    Args:
        spans (dict): Spans of a run, see ``benchmark_overlap.run``.
        kind (str): 'load', 'preprocess' or 'step'.
        on_main (Collection): On the main thread (True), beside it (False), or both.

    Returns:
        list[Block]: In the order of the batches.
    """
    zero = spans['load'][0].start
    return [
        Block(kind, batch, (span.start - zero, span.stop - zero))
        for batch, span in enumerate(spans[kind])
        if span.on_main in on_main
    ]


def waits(busy: Sequence[Block]) -> Iterator[Block]:
    """Where the main thread had nothing to do, from 2 ms on."""
    free = 0.0
    for _, batch, (start, stop) in busy:
        if start - free >= 2e-3:
            yield Block('wait', batch, (free, start))
        free = stop


class Drawing:
    """SVG markup that grows downwards.

    Args:
        seconds (float): Where the time axis ends.
    """

    def __init__(self, seconds: float) -> None:
        self.scale = (WIDTH - LEFT - RIGHT) / seconds
        self.seconds = seconds
        self.y = 0.0
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = '') -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, kind: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - GAP}" rx="3" '
            f'fill="{COLOURS[kind]}" stroke="#555" stroke-width="0.6"/>'
        )

    def heading(self, text: str) -> None:
        self.y += 30
        self.text(10, self.y, text, 'heading')
        self.y += 10

    def row(self, name: str, content: Sequence[Block]) -> None:
        baseline = self.y + (ROW - GAP) / 2 + 4
        self.text(LEFT - 10, baseline, name, 'row')
        for kind, batch, (start, stop) in content:
            x, width = LEFT + start * self.scale, (stop - start) * self.scale
            self.box(x, self.y, width, kind)
            if kind != 'wait':
                self.text(x + width / 2, baseline, str(batch), 'number')
        self.y += ROW

    def axis(self) -> None:
        self.y += 4
        self.parts.append(
            f'<path d="M{LEFT} {self.y:.1f}H{WIDTH - RIGHT}" class="axis" fill="none"/>'
        )
        for milliseconds in range(0, int(self.seconds * 1e3) + 1, 200):
            x = LEFT + milliseconds / 1e3 * self.scale
            self.parts.append(f'<path d="M{x:.1f} {self.y:.1f}v5" class="axis" fill="none"/>')
            self.text(x, self.y + 17, f'{milliseconds} ms', 'number small')
        self.y += 20

    def legend(self) -> None:
        self.y += 16
        x = float(LEFT)
        for kind in COLOURS:
            self.box(x, self.y, 24, kind)
            self.text(x + 32, self.y + 16, kind if kind != 'wait' else 'main thread waits')
            x += 130
        self.text(x + 40, self.y + 16, 'numbers are batches', 'small')
        self.y += ROW

    def caption(self, lines: Sequence[str]) -> None:
        self.y += 6
        for line in lines:
            self.y += 15
            self.text(10, self.y, line, 'small')

    def markup(self, title: str) -> str:
        height = self.y + 14
        return '\n'.join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
                f'width="{WIDTH}" height="{height:.0f}" role="img">',
                f'<title>{escape(title)}</title>',
                f'<style>{STYLE}</style>',
                '<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse">'
                '<rect width="6" height="6" fill="#fff"/>'
                '<path d="M0 6L6 0" stroke="#c1121f" stroke-width="1.2"/></pattern></defs>',
                f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>',
                *self.parts,
                '</svg>\n',
            ]
        )


def draw(
    stock: dict[str, list[Span]], ahead: dict[str, list[Span]], depth: int, caption: Sequence[str]
) -> str:
    """Draw both runs on one time axis.

    Args:
        stock (dict): Spans of the run under mmengine's loop, see ``benchmark_overlap.run``.
        ahead (dict): Spans of the run that looked ahead.
        depth (int): Its ``prefetch_depth``.
        caption (Sequence): Lines below the diagram.

    Returns:
        str: SVG markup.
    """
    seconds = max(run['step'][-1].stop - run['load'][0].start for run in (stock, ahead))
    drawing = Drawing(seconds)
    drawing.heading(f"mmengine's loop: {iteration_ms(stock['step']):.0f} ms an iteration")
    drawing.row('main thread', [block for kind in stock for block in blocks(stock, kind)])
    drawing.heading(
        f'PrefetchLoop, prefetch_depth={depth}: {iteration_ms(ahead["step"]):.0f} ms an iteration'
    )
    drawing.row('worker process', blocks(ahead, 'load'))
    drawing.row('loader thread', blocks(ahead, 'preprocess', on_main=[False]))
    busy = [*blocks(ahead, 'preprocess', on_main=[True]), *blocks(ahead, 'step')]
    busy.sort(key=lambda block: block.span)
    drawing.row('main thread', [*waits(busy), *busy])
    drawing.axis()
    drawing.legend()
    drawing.caption(caption)
    return drawing.markup('When batches are loaded, preprocessed and trained')


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and draw.

    Args:
        arguments (Sequence[str], optional): Command line. Defaults to the process's own.

    Returns:
        int: Exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default=Path('docs/timeline.svg'), help='SVG to write')
    parser.add_argument('--batches', type=int, default=8, help='batches of each run')
    parser.add_argument('--depth', type=int, default=2, help='prefetch_depth')
    parser.add_argument('--load', type=float, default=60, help='milliseconds')
    parser.add_argument('--preprocess', type=float, default=40, help='milliseconds')
    parser.add_argument('--step', type=float, default=80, help='milliseconds')
    args = parser.parse_args(arguments)
    if args.batches < 2:
        parser.error(f'--batches must be at least 2, got {args.batches}')
    times = dict(load=args.load, preprocess=args.preprocess, step=args.step)
    stock = run(times, args.batches, None, 0)
    ahead = run(times, args.batches, args.depth, 1)
    words = sys.argv[1:] if arguments is None else arguments
    caption = [
        'Two runs recorded on CPU: '
        + ', '.join(f'{name} {value:g} ms' for name, value in times.items())
        + '. Look-ahead begins when the model asks for the first batch.',
        ' '.join(['Drawn by: python tools/draw_timeline.py', *words]),
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(draw(stock, ahead, args.depth, caption))
    print(f'wrote {args.out}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
