"""One query on top of a snapshot: its private tail, what it reads of the snapshot, what it forgets of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from precis.core import Entries, Snapshot
from precis.tail import Tail, Watched
from precis.trims import Trim
from precis.trims.slide import Slide
from precis.views import View


@dataclass(slots=True)
class Session:
    """One query's state.

    Attributes:
        snapshot: shared and read-only.
        view: which entries of it are read after the query, or None for all.
        trim: which entries of the answer are dropped, or None for none.
        watched: for the trim, or None.
        asked: whether the query is complete.
        seen: per (layer, kv head), what the view chose.
    """

    snapshot: Snapshot
    tail: Tail
    view: View | None = None
    trim: Trim | None = None
    watched: Watched | None = None
    asked: bool = False
    seen: dict[tuple[int, int], Entries] = field(default_factory=dict)

    @staticmethod
    def on(snapshot: Snapshot, view: View | None = None, trim: Trim | None = None) -> Session:
        """A new, empty tail. A view that slides brings its own trim."""
        if view is not None and view.n_sliding:
            trim = Slide(view.n_sliding)
        g = snapshot.geometry
        watched = Watched.empty(g, trim.n_window, snapshot.keys) if trim is not None else None
        return Session(snapshot, Tail.empty(g, snapshot.keys), view, trim, watched)

    @property
    def position(self) -> int:
        """Of the next token: counted from the original length, however few entries are kept."""
        return self.snapshot.header.next_position + self.tail.n_tokens

    @property
    def looks_now(self) -> bool:
        """Whether the answer's next token is one after which the trim looks."""
        if self.trim is None or self.watched is None or not self.asked:
            return False
        return self.watched.n_seen + 1 - self.watched.looked_at >= self.trim.every

    def fed(self, n_tokens: int, *, last: bool) -> None:
        """Count what a step took in, once all layers have it."""
        looked = self.looks_now
        self.tail.n_tokens += n_tokens
        watched = self.watched
        if watched is not None and self.asked:
            watched.n_seen += n_tokens
            watched.looked_at = watched.n_seen if looked else watched.looked_at
        self.asked |= last
        if watched is not None and last:
            watched.n_asked = self.tail.n_tokens


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens of one session in a step.

    Attributes:
        last: whether these end the query, so that a view is chosen now.
        all_logits: logits after every token, not only after the last.
    """

    session: Session
    token_ids: Sequence[int]
    last: bool = False
    all_logits: bool = False
