// The decision on drafted blocks from the target's logits: how many tokens are kept, and which token follows.
//
// Used by rounds in one call (rounds.cpp), and for blocks whose logits Python holds (``fly_decide``).
#pragma once
#include "library.h"

namespace fly {

class Decider {
    // What a row's decided blocks have emitted since the call began. Clauses bring what was before it.
    struct Since {
        int64_t generated, relaxed;
        double nats, regret;  // of the relaxed tokens
    };

    struct Block;
    struct Place;

    const Rules& rules;
    Blocks& blocks;
    const Variant* code = nullptr;
    Arena arena;
    Span<float> coins, spread;
    Span<int8_t> agrees;  // for each drafted token whether the exact rule keeps it, or UNKNOWN
    Span<Since> since;    // [B]

    bool is_number(const Block& block, int place) const;
    bool agrees_with(Block& block, int node);
    float regret(const Block& block, int node) const;
    uint32_t clauses_held(Place& at);
    void note(Place& at, uint32_t held, bool excused);
    int keep_prefix(Block& block);
    int64_t follow(const Block& block, int kept);

public:
    Decider(const Rules* of, Blocks* in) : rules(*of), blocks(*in) {}

    // Checks the arguments, and makes room for a block of each of ``rows``. Returns an error or OK.
    int begin(int rows);

    // Decides the block of row ``b`` in a ``round``. ``logits`` [1 + its tokens, V] follow the row's last token, which
    // is token ``length``, and each drafted one. ``text`` are the row's tokens; those before the call may be missing.
    // ``distributions`` [its tokens, V] are those that the drafted tokens were drawn from; null: the draft is
    // deterministic. The block stays open if only Python knows what its rule excuses, or if the decision depends on a
    // NaN.
    void decide(int b, int round, int64_t length, const int64_t* text, const float* logits, const float* distributions);

    // The number of a row's block of a round.
    long place(int b, int round) const { return (long)b * blocks.most + round; }
};

}  // namespace fly
