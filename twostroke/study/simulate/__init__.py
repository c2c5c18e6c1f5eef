"""The engine on a virtual clock, with a cost model in place of kernels. The scheduler is the engine's own.

clock, events    virtual time, and what happens when
blank, device    memory, tokenizer and compiled pass: they take time and compute nothing
costs            how long a step takes: by a roofline of peaks, or at measured prices
opening          the engine itself over these
prompts          tokens of prompts whose pieces have names
call, worker     a request as its user sees it; one engine on its own clock
router, names    which worker gets a call; what its index holds
fleet, service   workers, links and faults; traffic on them
audit            every used page has a holder
"""
