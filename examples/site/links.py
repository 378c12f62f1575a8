"""Relative links of the repository's Markdown pages, led to where a page is shown."""

import posixpath
import re

# [words](target) and ![words](target), with pictures among the words
LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def led(text, page, place):
    """The text of a page, given by its path from the root, with its relative links and pictures led to
    ``place(path, picture)``, path again from the root; where that is None, only the words are left."""
    def replaced(match):
        picture, words, target, anchor = match.groups(default="")
        words = LINK.sub(replaced, words)
        leads = place(posixpath.normpath(posixpath.join(posixpath.dirname(page), target)), bool(picture))
        return f"{picture}[{words}]({leads}{'' if '#' in leads else anchor})" if leads else words

    return LINK.sub(replaced, text)
