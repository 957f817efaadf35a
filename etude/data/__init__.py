"""From repositories, text and conversations to packed token batches. Independent of models and agents.

build_corpus(sources, tokenizer, out)    filter, deduplicate, decontaminate, split and encode into token shards
Shards.open(corpus, split)               the documents of a split, memory-mapped
next_batch(Mixture(sources, ...), rows)  the next packed rows of a weighted mixture, as tensors (needs torch)
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.data.conversations import Chat, ChatFormat, ConversationSegment, read_conversations
    from etude.data.corpus import CorpusOptions, CorpusReport, build_corpus, read_report
    from etude.data.documents import Document, File, ReadLimits, read_source
    from etude.data.mixture import DocumentStore, Mixture, MixtureSource
    from etude.data.packing import Batch, next_batch
    from etude.data.shards import Shards, ShardWriter

_MODULES = {  # imported when first used: packing loads torch, which worker processes must not
    "Batch": "etude.data.packing",
    "Chat": "etude.data.conversations",
    "ChatFormat": "etude.data.conversations",
    "ConversationSegment": "etude.data.conversations",
    "CorpusOptions": "etude.data.corpus",
    "CorpusReport": "etude.data.corpus",
    "Document": "etude.data.documents",
    "DocumentStore": "etude.data.mixture",
    "File": "etude.data.documents",
    "Mixture": "etude.data.mixture",
    "MixtureSource": "etude.data.mixture",
    "ReadLimits": "etude.data.documents",
    "ShardWriter": "etude.data.shards",
    "Shards": "etude.data.shards",
    "build_corpus": "etude.data.corpus",
    "next_batch": "etude.data.packing",
    "read_conversations": "etude.data.conversations",
    "read_report": "etude.data.corpus",
    "read_source": "etude.data.documents",
}
__all__ = [
    "Batch",
    "Chat",
    "ChatFormat",
    "ConversationSegment",
    "CorpusOptions",
    "CorpusReport",
    "Document",
    "DocumentStore",
    "File",
    "Mixture",
    "MixtureSource",
    "ReadLimits",
    "ShardWriter",
    "Shards",
    "build_corpus",
    "next_batch",
    "read_conversations",
    "read_report",
    "read_source",
]
__getattr__ = lazy_exports(__name__, _MODULES)
