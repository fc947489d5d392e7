"""The look of a report, light and dark. Pictures carry their colours; in the dark those are exchanged by name."""

from __future__ import annotations

from kvweave.cli.svg.draw import EMPTY, FAINT, INK, LINE, NULL, PADDING, PAPER, WHITE

_DARK = {
    INK: "#e6eaee",
    FAINT: "#9aa5b1",
    LINE: "#3e4c59",
    PAPER: "#171c22",
    EMPTY: "#262d35",
    NULL: "#52606d",
    PADDING: "#616e7c",
    "#e4e7eb": "#2b333c",
}
"""White stays white: it is written on colours."""

_LIGHT_PAGE = (
    f"--ink: {INK}; --faint: {FAINT}; --line: {LINE}; --paper: {PAPER}; --card: {WHITE};"
    " --good: #1f7a6f; --bad: #c8473f"
)
_DARK_PAGE = (
    "--ink: #e6eaee; --faint: #9aa5b1; --line: #323b45; --paper: #11151a; --card: #171c22;"
    " --good: #4fc3b3; --bad: #ef7d75"
)

_RULES = """
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", Arial, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px }
h1 { font-size: 28px; margin: 0 0 4px } h2 { font-size: 20px; margin: 44px 0 4px }
p { margin: 4px 0 12px; color: var(--faint); max-width: 90ch }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 24px 0 }
.tile { flex: 1 1 180px; padding: 14px 18px }
.tile, figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px }
.tile b { display: block; font-size: 28px; line-height: 1.2 } .tile span { color: var(--faint); font-size: 14px }
.good b { color: var(--good) } .bad b { color: var(--bad) }
figure { margin: 8px 0; overflow: hidden }
figure svg { display: block; width: 100%; height: auto } figure svg.narrow { display: none }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line) }
th { color: var(--faint); font-weight: 500 } th:first-child, td:first-child { text-align: left }
summary { cursor: pointer; color: var(--faint); padding: 4px 0 }
@media (max-width: 900px) {
  main { padding: 20px 12px 48px }
  figure svg.wide { display: none } figure svg.narrow { display: block; max-width: 560px }
  h1 { font-size: 22px; overflow-wrap: anywhere } p { overflow-wrap: anywhere }
  .tile { flex-basis: 140px; padding: 10px 14px } .tile b { font-size: 22px }
  thead { display: none } tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line) }
  td, td:first-child { display: flex; gap: 16px; justify-content: space-between; border: 0; padding: 2px 0 }
  td::before { content: attr(data-head); color: var(--faint); flex: none } td:first-child { font-weight: 600 }
}
"""


def css() -> str:
    dark = "".join(
        f'svg [{what}="{light}"] {{ {what}: {shown} }} '
        for light, shown in _DARK.items()
        for what in ("fill", "stroke")
    )
    return (
        f":root {{ color-scheme: light dark; {_LIGHT_PAGE} }}{_RULES}"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK_PAGE} }} {dark}}}"
    )
