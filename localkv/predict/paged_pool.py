"""How vLLM cuts a model's layers into groups that share one pool of blocks.

Source: vLLM 0.32, v1/core/kv_cache_utils.py: get_kv_cache_groups, _get_kv_cache_groups_uniform_*,
unify_kv_cache_spec_page_size.
"""

from __future__ import annotations

from localkv.errors import UsageError
from localkv.predict.paged_pages import Page

#: Kinds that allocate a slot for every token; layers of them share a group at any page size.
_EVERY_TOKEN = frozenset({"full", "mla"})


def group_pages(pages: list[Page]) -> list[list[Page]]:
    """Return the groups: layers of one kind together, cut so that all groups are equally large.

    Raises:
        UsageError: pages that no block size makes equal, which vLLM refuses.
    """
    if _one_type(pages):
        return [pages]
    largest = max(page.bytes for page in pages)
    equal = [page.with_bytes(largest) for page in pages]
    unified = [page for page in equal if page is not None]
    if len(unified) < len(pages):
        raise UsageError(
            "the pages of MLA layers do not divide the largest page", "vLLM cannot serve this model"
        )
    return _equal_groups(unified)


def _one_type(pages: list[Page]) -> bool:
    """Return whether all layers need the same slots: UniformTypeKVCacheSpecs.is_uniform_type."""
    first = pages[0]
    if any(page.block_size != first.block_size for page in pages):
        return False
    if first.kind in _EVERY_TOKEN:
        return all(page.kind in _EVERY_TOKEN for page in pages)
    if first.kind == "recurrent":
        return all(page.kind == first.kind and page.bytes == first.bytes for page in pages)
    return all(page.kind == first.kind and page.window == first.window for page in pages)


def _equal_groups(pages: list[Page]) -> list[list[Page]]:
    """Return groups of one size: the smallest kind's count, or the largest when they are close.

    Up to one and a half times the smallest count, a group is as large as the largest kind, and
    the rest is padding. Layers are dealt out in turn, so that pipeline stages stay balanced.
    """
    kinds: dict[Page, list[Page]] = {}
    for page in pages:
        kinds.setdefault(page, []).append(page)
    counts = [len(members) for members in kinds.values()]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    groups = []
    for members in kinds.values():
        number = -(-len(members) // size)
        groups += [members[start::number] for start in range(number)]
    return groups
