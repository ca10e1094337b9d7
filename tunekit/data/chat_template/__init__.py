"""Conversations: from what a row holds to a text in which it is known what is learnt.

messages    checks a row's conversation before a template sees it, and writes it as templates expect
dialects    ShareGPT, Alpaca, prompts with completions and pairs as such conversations
plain       values of JSON
template    the checkpoint's Jinja chat template, with `{% generation %}`
sandbox     what a template runs in, where all has an end
manner      how a template wants messages, found by trying
turns       where a turn stands in what a template writes, found with texts hidden
layout      what was found of one conversation, for others of its shape
spans       which characters of a rendered conversation are learnt, and which tokens those are
said        what a template leaves out
"""
