"""From repositories, text and conversations to packed token batches. Independent of models and agents.

build_corpus(sources, tokenizer, out)    filter, deduplicate, decontaminate, split and encode into token shards
Shards.open(corpus, split)               the documents of a split, memory-mapped
next_batch(Mixture(sources, ...), rows)  the next packed rows of a weighted mixture, as tensors (needs torch)
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.data.corpus import build_corpus as build_corpus
    from etude.data.mixture import Mixture as Mixture
    from etude.data.shards import Shards as Shards

__getattr__ = lazy_exports(__name__)
