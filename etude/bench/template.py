"""HTML template and style of the report. Jinja escapes all values; the page has no script."""

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --panel: #f6f8fa;
  --good: 45, 164, 78; --bad: #cf222e; --accent: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #30363d;
  --panel: #151b23; --good: 63, 185, 80; --bad: #f85149; --accent: #4493f8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 5rem; max-width: 72rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.75rem; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.1rem; margin: 2.75rem 0 .5rem; }
p { margin: .25rem 0 .75rem; max-width: 46rem; }
.soft { color: var(--soft); }
.notice { border-left: 3px solid var(--accent); background: var(--panel); padding: .6rem .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
th, td { padding: .38rem .9rem .38rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; font-size: .87rem; color: var(--soft); }
th[scope=row] { color: var(--ink); font-size: 1em; }
th.text, td.text { text-align: left; }
td.reason { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
td small { color: var(--soft); }
.stacked td { vertical-align: top; } .stacked small { display: block; min-height: 1.2em; }
.stacked th[scope=row] { vertical-align: top; }
.dot { display: inline-block; width: .65em; height: .65em; border-radius: 50%; margin-right: .5em; }
.matrix td { padding: .2rem .75rem; text-align: center; border-left: 1px solid var(--line);
  background: rgba(var(--good), calc(var(--share, 0) * .45)); }
.matrix td.lost { color: var(--soft); font-style: italic; }
.matrix th[scope=row] { font-weight: 400; padding-right: 1.25rem; }
.plot { color: var(--soft); max-width: 100%; height: auto; }
.span { vertical-align: middle; } .span .rule { stroke: var(--line); } .span .zero { stroke: var(--soft); }
.span .bar { stroke-width: 3; stroke: currentColor; } .span circle { fill: currentColor; }
.span.up { color: rgb(var(--good)); } .span.down { color: var(--bad); } .span.level { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.25rem; } dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media print { body { max-width: none; padding: 0; } section { break-inside: avoid; } }
"""

PAGE = """\
{% macro label(policy) %}
<span class="dot" style="background: {{ colours[colour_index[policy] % colours|length] }}" aria-hidden="true"></span>
{{- policy }}{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ name }}: policies compared</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<header>
<h1>{{ name }}</h1>
<p class="soft">{{ policies|length }} {{ "policy" if policies|length == 1 else "policies" }},
{{ summary.settings.tasks }} tasks, {{ summary.samples }} {{ "sample" if summary.samples == 1 else "samples" }} of each.
Every trial is a session of the same agent in a pod, scored by the task's own verifier.</p>
{% if not summary.finished %}
<p class="notice">Not finished: only tasks whose trials are all scored count here.</p>
{% endif %}
</header>

<section>
<h2>Results</h2>
<div class="wide"><table class="stacked">
<caption>Means over tasks; below them 95% bootstrap intervals over tasks. Tokens, time and cost are per
trial.</caption>
<thead><tr><th class="text" scope="col">policy</th><th scope="col">tasks</th><th scope="col">solved</th>
{% if k|int > 1 %}<th scope="col">pass@{{ k }}</th>{% endif %}
{% if scored %}<th scope="col">score</th>{% if k|int > 1 %}<th scope="col">best of {{ k }}</th>{% endif %}{% endif %}
<th scope="col">sampled tokens</th><th scope="col">prompt tokens</th>
<th scope="col">turns</th><th scope="col">seconds</th>
{% if priced %}<th scope="col">cost</th><th scope="col">per solved trial</th>{% endif %}</tr></thead>
<tbody>
{% for policy in policies %}
<tr><th class="text" scope="row" title="{{ policy.where }}">{{ label(policy.name) }}</th><td>{{ policy.tasks }}</td>
{% if policy.accuracy is defined %}
<td><b>{{ policy.accuracy.mean|percent }}</b><small>{{ policy.accuracy|bounds }}</small></td>
{% if k|int > 1 %}
<td>{{ policy.pass_at[k].mean|percent if k in policy.pass_at else "–" }}
<small>{{ policy.pass_at[k]|bounds if k in policy.pass_at }}</small></td>
{% endif %}
{% if scored %}
<td>{{ policy.score.mean|number }}</td>
{% if k|int > 1 %}<td>{{ policy.best_of[k]|number if k in policy.best_of else "–" }}</td>{% endif %}
{% endif %}
<td>{{ policy.spent.made.mean|number }}<small>{{ policy.spent.made|number_range }}</small></td>
<td>{{ policy.spent.prompt.mean|number }}<small>{{ policy.spent.cached.mean|number }} cached</small></td>
<td>{{ policy.spent.turns.mean|number }}</td><td>{{ policy.spent.seconds.mean|number }}</td>
{% if priced %}
<td>{{ policy.spent.dollars.mean|dollars if "dollars" in policy.spent else "–" }}</td>
<td>{{ policy.per_solved.dollars|dollars if "dollars" in policy.per_solved else "–" }}</td>
{% endif %}
{% else %}
<td class="text soft" colspan="12">no task is finished</td>
{% endif %}
</tr>
{% endfor %}
</tbody></table></div>
</section>

{% if plot %}
<section>
<h2>Tokens and cost</h2>
<div class="wide">{{ plot }}</div>
{% if not priced %}
<p class="soft">Cost is shown if prices are given: <code>--price NAME=IN,OUT</code>, dollars per million tokens.</p>
{% endif %}
</section>
{% endif %}

{% if summary.differences %}
<section>
<h2>Differences</h2>
<div class="wide"><table>
<caption>Percentage points of tasks solved, paired by task, over tasks that both have finished. An interval that
contains zero shows no difference.</caption>
<thead><tr><th class="text" scope="col">policy</th><th class="text" scope="col">against</th><th scope="col">points</th>
<th class="text" scope="col">95% interval</th><th class="text" scope="col"></th><th scope="col">tasks</th>
<th scope="col">better</th><th scope="col">worse</th></tr></thead>
<tbody>
{% for each in summary.differences %}
<tr><th class="text" scope="row">{{ label(each.to) }}</th><td class="text">{{ label(each["from"]) }}</td>
{% if each.tasks %}
<td><b>{{ each.accuracy.mean|points }}</b></td>
<td class="text">{{ each.accuracy|bounds or "none: only one task" }}</td>
<td class="text">{{ difference_bar(each.accuracy) }}</td>
<td>{{ each.tasks }}</td><td>{{ each.better }}</td><td>{{ each.worse }}</td>
{% else %}
<td class="text soft" colspan="6">no task finished by both</td>
{% endif %}
</tr>
{% endfor %}
</tbody></table></div>
</section>
{% endif %}

{% if categories %}
<section>
<h2>By category</h2>
<div class="wide"><table>
<caption>Tasks solved; in brackets the number of tasks.</caption>
<thead><tr><th class="text" scope="col">category</th>
{% for policy in policies %}
<th scope="col">{{ label(policy.name) }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for category in categories %}
<tr><th class="text" scope="row">{{ category }}</th>
{% for policy in policies %}
{% set found = policy.by_category.get(category) if policy.by_category is defined else none %}
<td>{% if found %}{{ found.accuracy|percent }} <small>({{ found.tasks }})</small>{% else %}–{% endif %}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
</section>
{% endif %}

{% if summary.tasks %}
<section>
<h2>Task by task</h2>
<div class="wide"><table class="matrix">
<caption>Samples solved, of those that are scored.</caption>
<thead><tr><th class="text" scope="col">task</th><th class="text" scope="col">category</th>
{% for policy in policies %}
<th scope="col">{{ label(policy.name) }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in summary.tasks %}
<tr><th class="text" scope="row">{{ row.task }}</th><th class="text" scope="row">{{ row.category }}</th>
{% for policy in policies %}
{% set cell = task_cell(row, policy.name) %}
<td title="{{ cell.title }}"{% if cell.share is none %} class="lost"{% else %} style="--share: {{ cell.share }}"
{%- endif %}>{{ cell.words }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
</section>
{% endif %}

{% macro shares(title, caption, names, value) %}
<section>
<h2>{{ title }}</h2>
<div class="wide"><table>
<caption>{{ caption }}</caption>
<thead><tr><th class="text" scope="col"></th>
{% for policy in policies %}
<th scope="col">{{ label(policy.name) }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for name in names %}
<tr><th class="text" scope="row">{{ name }}</th>
{% for policy in policies %}
<td>{{ value(policy, name) }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
</section>
{% endmacro %}
{% if endings %}{{ shares("How sessions ended", "Fraction of trials.", endings, ending) }}{% endif %}
{% if errors %}{{ shares("Failed tool calls", "Per hundred tool calls, by class.", errors, error) }}{% endif %}

<section>
<h2>Infrastructure failures</h2>
<div class="wide"><table>
<caption>Trials that failed for reasons outside the agent were run again; they do not count as failures of a
policy.</caption>
<thead><tr><th class="text" scope="col">policy</th><th scope="col">failures</th><th class="text" scope="col">by
class</th><th class="text" scope="col">tasks given up</th></tr></thead>
<tbody>
{% for policy in policies %}
<tr><th class="text" scope="row">{{ label(policy.name) }}</th><td>{{ policy.infrastructure.failures }}</td>
<td class="text reason">{% for name, count in policy.infrastructure.by_class.items() %}{{ name }}: {{ count }}
{{- ", " if not loop.last }}{% else %}–{% endfor %}</td>
<td class="text reason">{% for task, why in policy.infrastructure.given_up.items() %}<div>{{ task }}:
<small>{{ why }}</small></div>{% else %}–{% endfor %}</td></tr>
{% endfor %}
</tbody></table></div>
</section>

<section>
<h2>Settings</h2>
<dl>
{% for policy in policies %}
<dt>{{ policy.name }}</dt><dd>{{ policy.kind }} {{ policy.where }},
context window {{ "{:,}".format(policy.window) }} tokens, dialect {{ policy.dialect }}{% if policy.price %},
${{ policy.price.read }} per million prompt tokens, ${{ policy.price.cached }} cached,
${{ policy.price.made }} sampled{% endif %}</dd>
{% endfor %}
{% for key, value in summary.settings.items() if value is not mapping %}
<dt>{{ key }}</dt><dd>{{ value }}</dd>
{% endfor %}
{% for key, values in summary.settings.items() if values is mapping %}
<dt>{{ key }}</dt><dd>{% for part, value in values.items() if value not in (none, "", {}, []) %}{{ part }}
{{ value|join(", ") if value is sequence and value is not string else value }}
{{- "; " if not loop.last }}{% endfor %}</dd>
{% endfor %}
</dl>
</section>
</main>
</body>
</html>
"""
