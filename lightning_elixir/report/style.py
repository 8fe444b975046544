"""Colours and layout of the page. The bright scheme of Paul Tol, which colour-blind readers tell apart."""

from __future__ import annotations

# Light fills carry dark text and dark ones light text; neighbours in a stack alternate.
STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1d2430; --soft: #5b6676; --line: #d5dae1; --card: #f5f7f9; --alarm: #b3202c; --good: #1c6b2a;
  --blue: #4477aa; --cyan: #66ccee; --green: #228833; --yellow: #ccbb44; --red: #ee6677; --purple: #aa3377;
  --grey: #bbbbbb; --sand: #ddccaa; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181e; --ink: #e8ecf1; --soft: #a5b0bf; --line: #3a4350; --card: #1d232b; --alarm: #ff8d96; --good: #7fd08f;
  --purple: #b8478a; --grey: #98a1ad; } }
* { box-sizing: border-box; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
body { background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif;
  max-width: 1160px; margin: 0 auto; padding: 24px 20px 40px; }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 32px 0 4px; }
p { margin: 4px 0 10px; max-width: 115ch; } .soft { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 10px; margin: 16px 0 0; }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.cards dt { color: var(--soft); font-size: 13px; } .cards dd { margin: 0; font-size: 19px; font-weight: 600; }
.cards dd small { display: block; font-size: 13px; font-weight: 400; color: var(--soft); overflow-wrap: anywhere; }
.binding { margin-top: 14px; }
.cards .good dd b { color: var(--good); } .cards .bad dd b { color: var(--alarm); }
.picture { overflow-x: auto; } svg { display: block; width: 100%; min-width: 720px; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); } svg .on-dark { fill: #ffffff; } svg .on-light { fill: #1d2430; }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .limit { stroke: var(--alarm); stroke-width: 2; stroke-dasharray: 7 4; } svg .alarm { fill: var(--alarm); }
svg .edge { stroke: var(--page); stroke-width: .8; } svg .halo { paint-order: stroke; stroke: var(--page);
  stroke-width: 3.5px; stroke-linejoin: round; }
svg .measured { fill: none; stroke: var(--ink); stroke-width: 1.8; } svg .dot { fill: var(--ink); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 6px 0 8px; padding: 0; list-style: none;
  font-size: 13px; }
svg.swatch { display: inline-block; width: 14px; min-width: 14px; height: 14px; vertical-align: -2px;
  margin-right: 6px; }
svg.bar { min-width: 0; height: 22px; margin: 6px 0 8px; }
h3 { font-size: 14px; margin: 12px 0 2px; }
svg text { pointer-events: none; }
.blue { fill: var(--blue); } .cyan { fill: var(--cyan); }
.green { fill: var(--green); } .yellow { fill: var(--yellow); }
.red { fill: var(--red); } .purple { fill: var(--purple); } .grey { fill: var(--grey); } .sand { fill: var(--sand); }
.free { fill: var(--card); stroke: var(--line); } .none { fill: none; stroke: var(--soft); stroke-width: 1.2; }
.hatched { fill: url(#hatch); } #hatch rect { fill: var(--red); } #hatch path { stroke: #3a0d12; stroke-width: 1.6; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); column-gap: 36px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; margin: 4px 0; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
th { font-weight: 600; color: var(--soft); } .num { text-align: right; white-space: nowrap; }
tr.sum td { font-weight: 600; border-bottom: 2px solid var(--line); }
footer { margin-top: 36px; color: var(--soft); font-size: 13px; }
@media print { :root { color-scheme: only light;
  --page: #ffffff; --ink: #000000; --soft: #444444; --line: #bbbbbb; --card: #ffffff; --alarm: #b3202c; --good: #1c6b2a;
  --purple: #aa3377; --grey: #bbbbbb; }
  section, .cards div, tr { break-inside: avoid; } body { max-width: none; padding: 0; }
  svg { min-width: 0; } .picture { overflow: visible; } }
"""
