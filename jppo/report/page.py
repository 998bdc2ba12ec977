"""The frame of report.html: one template and one style sheet, nothing from the web.

The policy in the head forbids scripts and loads outright, so that what a model wrote
stays inert even if an escape were ever forgotten.
"""

from string import Template

PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<link rel="icon" href="data:,">
<style>
$style</style>
</head>
<body>
<main>
<header>
<h1>$title</h1>
<p class="meta">$meta</p>
<p class="lead">$lead</p>
</header>
$body
<footer>Written by jppo. This file stands alone: no scripts, no network.</footer>
</main>
</body>
</html>
""")

STYLE = """\
:root {
  --page: #f6f7f8; --card: #ffffff; --ink: #1f2328; --muted: #5d6570;
  --rule: #dde2e7; --blue: #2f6fb0; --gold: #a86c12; --red: #b5483a;
  --green: #35765a; --before: #8a94a0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101316; --card: #181c20; --ink: #e4e7ea; --muted: #9aa4ae;
    --rule: #2c3238; --blue: #6ea8de; --gold: #dba64a; --red: #e07f6f;
    --green: #6cbd96; --before: #6f7985;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue",
    Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 64px; }
h1 { font-size: 34px; line-height: 1.15; letter-spacing: -.02em; margin: 0 0 6px;
  overflow-wrap: anywhere; }
h2 { font-size: 20px; letter-spacing: -.01em; margin: 48px 0 14px; }
h3 { font-size: 15px; margin: 0 0 8px; }
p { margin: 0; }
.meta, .note, footer { color: var(--muted); font-size: 14px; }
.lead { font-size: 18px; max-width: 46em; margin-top: 20px; text-wrap: pretty; }
.lead b { font-weight: 600; }
.warn { color: var(--red); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 20px 22px; min-width: 0; }
.grid { display: grid; gap: 18px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.facts { grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); margin-top: 32px; }
.facts .card:only-child { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 15px; }
th { color: var(--muted); font-size: 13px; font-weight: 500; text-align: right;
  padding: 0 0 8px 14px; }
td { text-align: right; padding: 9px 0 9px 14px; border-top: 1px solid var(--rule);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td:first-child { white-space: normal; }
td small { display: block; color: var(--muted); font-size: 12.5px; line-height: 1.35; }
td .se { color: var(--muted); font-size: 13px; font-weight: 400; }
td.after { font-weight: 600; }
.meter { margin: 0 0 14px; }
.meter div { display: flex; justify-content: space-between; font-size: 15px; }
.meter b { font-weight: 600; }
.track { display: block; height: 8px; margin-top: 5px; border-radius: 4px;
  background: var(--rule); position: relative; overflow: hidden; }
.track i { display: block; height: 100%; background: var(--blue); }
.meter.plain .track i { background: var(--before); }
.track s { position: absolute; left: 50%; top: 0; bottom: 0; width: 2px;
  background: var(--card); }
dl { display: flex; flex-wrap: wrap; gap: 10px 28px; margin: 16px 0 0; }
dt { color: var(--muted); font-size: 13px; }
dd { margin: 0; font-size: 17px; font-weight: 600; }
.plot svg { display: block; width: 100%; height: auto; }
.plot svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif !important; }
.plot p { font-size: 14px; margin-top: 10px; line-height: 1.5; }
.plot .here { color: var(--muted); margin-top: 4px; }
h2 + .note { margin: -8px 0 14px; }
.samples { display: grid; gap: 14px; }
.prompt { font-size: 15px; white-space: pre-wrap; overflow-wrap: anywhere;
  color: var(--muted); margin-bottom: 12px; }
.pair { display: grid; gap: 22px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.side { border-left: 3px solid var(--before); padding-left: 14px; min-width: 0; }
.side.after { border-color: var(--blue); }
.side h4 { margin: 0 0 4px; font-size: 13px; font-weight: 500; color: var(--muted);
  display: flex; flex-wrap: wrap; gap: 2px 14px; }
.side h4 b { color: var(--ink); font-weight: 600; }
.side p { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 15px; }
details { margin-top: 48px; }
summary { cursor: pointer; font-weight: 600; font-size: 15px; }
pre { margin: 14px 0 0; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas,
  "Liberation Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
footer { margin-top: 48px; }
@media (max-width: 760px) {
  main { padding: 28px 14px 40px; }
  h1 { font-size: 27px; }
  .lead { font-size: 17px; }
  .grid, .facts, .pair { grid-template-columns: minmax(0, 1fr); }
  .pair { gap: 14px; }
  .card { padding: 16px 15px; }
  table { font-size: 14px; }
  th, td { padding-left: 9px; }
  td .se { display: block; font-size: 12.5px; }
}
@media print {
  body { background: none; }
  .card { break-inside: avoid; }
}
"""
