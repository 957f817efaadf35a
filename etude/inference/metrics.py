"""Statistics of the service in Prometheus' text format."""

from etude.inference.service import Stats
from etude.system.prometheus import PrometheusText


def prometheus(stats: Stats) -> str:
    """Return one metric family per number; counters end in _total. Drafts appear only with speculation."""
    text = PrometheusText("etude_inference")
    family = text.family
    family("tokens_made_total", "counter", "Tokens sampled.", ("", stats.output_tokens))
    family("tokens_read_total", "counter", "Tokens prefilled, recomputation included.", ("", stats.prefill_tokens))
    family("prompt_tokens_total", "counter", "Prompt tokens of sequences that ended.", ("", stats.prompt_tokens))
    family("cached_tokens_total", "counter", "Of those, found in the prefix cache.", ("", stats.cached_tokens))
    family("requests_total", "counter", "Requests accepted.", ("", stats.requests))
    family("refused_total", "counter", "Requests refused because the queue was full.", ("", stats.refused))
    text.labelled("samples_total", "counter", "Sequences by how they ended.", "ending", stats.endings)
    family("preemptions_total", "counter", "Times a sequence was preempted.", ("", stats.preemptions))
    family("swaps_total", "counter", "Times new weights were loaded.", ("", stats.swaps))
    family("steps_total", "counter", "Steps of the engine.", ("", stats.steps))
    family("busy_seconds_total", "counter", "Seconds inside steps.", ("", stats.busy_s))
    if stats.accepted:
        family("draft_rounds_total", "counter", "Times a sequence's drafts were verified.", ("", stats.draft_rounds))
        depths = [(f'{{depth="{depth}"}}', count) for depth, count in enumerate(stats.accepted, 1)]
        family("drafts_accepted_total", "counter", "Drafts accepted, by their position in a round.", *depths)
    first, each = stats.first_token.lines(), stats.output_token.lines()
    family("time_to_first_token_seconds", "histogram", "From a request to a sequence's first token.", *first)
    family("time_per_output_token_seconds", "histogram", "A finished sequence's mean for every later token.", *each)
    family("running", "gauge", "Sequences running.", ("", stats.running))
    family("waiting", "gauge", "Sequences waiting.", ("", stats.waiting))
    family("pages_held", "gauge", "Pages of the cache in use.", ("", stats.pages_held))
    family("pages", "gauge", "Pages of the cache.", ("", stats.pages))
    family("version", "gauge", "Version of the weights.", ("", stats.version))
    family("state", "gauge", "1 for the state the service is in.", (f'{{state="{stats.state}"}}', 1))
    return str(text)
