// The decision on drafted blocks from the target's logits: how many tokens are kept, and which token follows.
//
// Used by rounds in one call (rounds.cpp), and for blocks whose logits Python holds (``fly_decide``).
#pragma once
#include "library.h"

namespace fly {

class Decider {
    const Rules& rules;
    Blocks& blocks;
    const Variant* code = nullptr;
    Arena arena;
    Span<float> coins, spread;
    Span<uint8_t> agrees;   // whether the exact rule keeps each drafted token

    struct Block;
    struct Place;

    bool is_number(const Block& block, int place) const;
    Place look(const Block& block, int place) const;
    double entropy(const Block& block, const Place& at, bool processed);
    bool clause_holds(const Clause& clause, const Block& block, const Place& at, int node, int after, int agreeing);
    uint32_t clauses_held(const Block& block, const Place& at, int node, int after, int agreeing);
    bool note(const Block& block, const Place& at, int node, uint32_t held, bool excused);
    int keep_prefix(Block& block);

public:
    Decider(const Rules* of, Blocks* in) : rules(*of), blocks(*in) {}

    // Checks the arguments, and makes room for a block of each of ``rows``. An error or OK.
    int begin(int rows);

    // Decides the block of row ``b`` in a ``round``. ``logits`` [1 + its tokens, V] follow the row's last token, which
    // is token ``length``, and each drafted one. ``distributions`` [its tokens, V] are those that the tokens were drawn
    // from; null: the draft is deterministic. The block stays open if only Python knows what its rule excuses, or if
    // the decision depends on a NaN.
    void decide(int b, int round, int64_t length, const float* logits, const float* distributions);

    // The number of a row's block of a round.
    long place(int b, int round) const { return (long)b * blocks.most + round; }
};

}  // namespace fly
