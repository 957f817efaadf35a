"""From repositories, text and conversations to packed token batches. Independent of models and agents.

build_corpus(sources, tokenizer, out)    filter, deduplicate, decontaminate, split and encode into token shards
Shards.open(corpus, split)               the documents of a split, memory-mapped
next_batch(Mixture(sources, ...), rows)  the next packed rows of a weighted mixture, as tensors (needs torch)
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.data.conversations import Chat as Chat
    from etude.data.conversations import ChatFormat as ChatFormat
    from etude.data.conversations import ConversationSegment as ConversationSegment
    from etude.data.conversations import read_conversations as read_conversations
    from etude.data.corpus import CorpusOptions as CorpusOptions
    from etude.data.corpus import CorpusReport as CorpusReport
    from etude.data.corpus import build_corpus as build_corpus
    from etude.data.corpus import read_report as read_report
    from etude.data.documents import Document as Document
    from etude.data.documents import File as File
    from etude.data.documents import ReadLimits as ReadLimits
    from etude.data.documents import read_source as read_source
    from etude.data.mixture import DocumentStore as DocumentStore
    from etude.data.mixture import Mixture as Mixture
    from etude.data.mixture import MixtureSource as MixtureSource
    from etude.data.packing import Batch as Batch
    from etude.data.packing import next_batch as next_batch
    from etude.data.shards import Shards as Shards
    from etude.data.shards import ShardWriter as ShardWriter

__getattr__ = lazy_exports(__name__)
