// The decision on drafted blocks, from the target's logits: what stands, and which token follows. Rounds that are taken in one
// call (rounds.cpp) and blocks whose logits Python holds (``fly_decide``) are decided here alone.
#pragma once
#include "library.h"

namespace fly {

class Decider {
    const Rules& rules;
    Blocks& blocks;
    const Variant* judge = nullptr;
    Arena arena;
    Span<float> coins, spread;
    Span<uint8_t> agrees;   // which drafted tokens the exact rule keeps
    Span<int64_t> tokens;  // those that may follow one place of a tree, and their nodes
    Span<int32_t> nodes;

    struct Block;
    struct Place;

    bool is_number(const Block& block, int place) const;
    Place look(const Block& block, int place) const;
    double entropy(const Block& block, const Place& at, bool processed);
    bool holds_at(const Clause& clause, const Block& block, const Place& at, int node, int after, int same);
    uint32_t ask(const Block& block, const Place& at, int node, int after, int same);
    bool note(const Block& block, const Place& at, int node, uint32_t held, bool excused);
    int keep_prefix(Block& block);
    int keep_path(Block& block);
    bool excuse_node(const Block& block, const Place& at, int node);

public:
    Decider(const Rules* of, Blocks* in) : rules(*of), blocks(*in) {}

    // Checks that all is there, and makes room for the blocks of so many ``rows``. An error or OK.
    int begin(int rows);

    // Decides about the block of row ``b`` in a ``round``, by ``logits`` [1 + its tokens, V] after the row's last token, at
    // ``length`` tokens, and after each drafted one. ``distributions`` [its tokens, V] is what they were drawn from; null is
    // a deterministic draft. A block stays open where only Python knows what its rule excuses, and where a NaN stands in
    // the way.
    void decide(int b, int round, int64_t length, const float* logits, const float* distributions);

    // Where a row's block of a round lies.
    long place(int b, int round) const { return (long)b * blocks.most + round; }
};

}  // namespace fly
