"""Draws docs/overview.svg: ranks, their rack's aggregator, and what travels between them.

python3 docs/overview.py > docs/overview.svg
"""

WIDTH, HEIGHT = 760, 300
INK, ZERO, PAPER = "#1f3b57", "#d9e2ea", "#ffffff"
RANKS = [[1, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]]
BLOCK, GAP, ROW = 22, 4, 80


def text(x: int, y: int, content: str, size: int = 14, anchor: str = "start") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">'
        f"{content}</text>"
    )


def blocks(x: int, y: int, filled: list[int]) -> list[str]:
    """Draws the blocks of a tensor. Blocks of zeros are pale."""
    return [
        f'<rect x="{x + i * (BLOCK + GAP)}" y="{y}" width="{BLOCK}" height="{BLOCK}" rx="3" '
        f'fill="{INK if is_full else ZERO}"/>'
        for i, is_full in enumerate(filled)
    ]


def arrow(x1: int, y1: int, x2: int, y2: int, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="6 5"' if dashed else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="2"{dash} '
        'marker-end="url(#head)"/>'
    )


def picture() -> str:
    union = [int(any(column)) for column in zip(*RANKS)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" role="img">',
        "<title>Ranks send their blocks that are not zero; the aggregator multicasts the sums"
        "</title>",
        '<defs><marker id="head" markerWidth="10" markerHeight="8" refX="9" refY="4" '
        f'orient="auto"><path d="M0,0 L10,4 L0,8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        f'<rect x="500" y="60" width="240" height="180" rx="10" fill="none" stroke="{INK}" '
        'stroke-width="2"/>',
        text(620, 90, "aggregator", 16, "middle"),
        text(620, 112, "adds blocks in rank order", 13, "middle"),
        *blocks(542, 150, union),
        text(620, 200, "sums of the union", 13, "middle"),
        text(335, 24, "UDP: blocks that are not zero", 13, "middle"),
        text(335, 286, "sums, by multicast or a copy to each rank", 13, "middle"),
    ]
    for rank, filled in enumerate(RANKS):
        y = 50 + rank * ROW
        parts += [text(20, y + 16, f"rank {rank}"), *blocks(80, y, filled)]
        parts += [arrow(250, y + 6, 494, 110 + rank * 30)]
        parts += [arrow(494, 124 + rank * 30, 250, y + 20, dashed=True)]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    print(picture(), end="")
