"""Where a prefill chunk ends, and how many pages tokens need. Pure arithmetic on token counts."""


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def chunk_end(start: int, fill: int, page_size: int, most: int) -> int:
    """End of the chunk that begins at ``start`` of ``fill`` known tokens and computes at most ``most`` of them.

    A page multiple, or ``fill`` itself. Equal to ``start`` if not even the rest of a page fits.
    """
    if fill - start <= most:
        return fill
    end = start + most
    return max(start, end - end % page_size)
