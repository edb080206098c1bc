// What the Python side hands over, laid out as there (fly/backends/cpu/library.py): a change of anything here changes
// ``fly_abi`` as well. Knows nothing of how a model is packed or run.
//
// Shapes, here and in all other sources: T packed tokens, C hidden width, N outputs and K inputs of a matrix, H query
// heads, G key/value heads, D head width, S stored tokens of a row, Z tokens a page, B rows, V vocabulary.
#pragma once
#include <stdint.h>

#define ALWAYS_INLINE inline __attribute__((always_inline))  // what would be called by way of memory, or linked in once for
                                                             // all variants

namespace fly {

// Memory that one side of a call hands to the other: where it begins, and its bytes, less than 0 where there is none. Who is
// called checks that it holds what is needed (library.h: holds).
template <class T>
struct Span {
    T* at = nullptr;
    int64_t bytes = -1;

    Span() = default;
    ALWAYS_INLINE Span(T* from, int64_t size) : at(from), bytes(size) {}
    template <class U>
    ALWAYS_INLINE Span(const Span<U>& other) : at(other.at), bytes(other.bytes) {}
    ALWAYS_INLINE operator T*() const { return at; }
    ALWAYS_INLINE bool there() const { return bytes >= 0; }
    ALWAYS_INLINE int64_t count() const { return there() ? bytes / (int64_t)sizeof(T) : 0; }
    ALWAYS_INLINE T* begin() const { return at; }
    ALWAYS_INLINE T* end() const { return at + count(); }
    // Only so many values of it.
    ALWAYS_INLINE Span first(int64_t n) const { return {at, n < count() ? n * (int64_t)sizeof(T) : bytes}; }
};

// W8A8 is int8 whose products are of whole numbers: what it is multiplied with is rounded to 8 bits as well, row by row.
// GROUPED matrices hold unsigned numbers of 4 or 8 bits in groups along the input, each group with a scale and a minimum of
// its own; what they are multiplied with is rounded to 8 bits in groups of 32.
enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, W8A8 = 3, GROUPED = 4 };

// Rows of a matrix in the blocks of a GGUF file. ``kind`` is the file format's number of their type (blocks.cpp has those
// that are known). Each row begins with a new block.
struct Stored {
    int32_t kind, rows;
    Span<const char> data;
};

struct Shape {
    int32_t width, intermediate, layers, heads, kv_heads, head_dim, vocab, positions;
    int32_t weights;  // Type of the matrices
    int32_t hidden;   // Type of the hidden states that go in and out, and of an embedding of its own
    int32_t gelu;     // the activation is GELU by tanh, not SiLU
    int32_t ropes;    // tables of cosines and sines
    int32_t features; // of a draft head (fly/models/eagle.py): values of the target's hidden states; 0 is a model by itself
    int32_t normed;   // of a head: the residual is the normed feature
    float eps;
    float scale;      // of products of queries and keys
    float embedding;  // what embeddings are multiplied with
};

// What a forward is about.
struct Batch {
    int32_t rows, tokens;
    Span<const int64_t> token, position;     // [T]
    Span<const int32_t> start, count;        // [B]
    Span<const Span<const int32_t>> tables;  // [B] each row's pages
    Span<const Span<const uint8_t>> masks;   // [B] [count, start + count] what each new token sees; none is causal
    Span<char> keys, values;                 // [layers, slots, G, D]
    int64_t layer_stride;                    // in values
    int32_t cache_type, page;
    int32_t threads;
};

// How a row draws (fly/runtime/sampling.py: Distribution). At temperature 0 it takes the most likely.
struct Sampling {
    float temperature, top_p, floor;  // floor: temperature · ln min_p, -inf where that is off
    int32_t top_k;                    // 0 is off
};

// Where a drafter stops: after a token if none had at least this probability there, if the entropy there was higher, in
// nats, or if the product of the largest probabilities up to there is less (fly/drafts/model.py: SingleDraft). 0 and
// infinity never stop it.
struct Sure {
    float confidence, entropy, reach;

    bool asks() const { return confidence > 0 || reach > 0 || entropy < __builtin_inff(); }
};

// Prompt lookup for a drafter (fly/drafts/ngram.py), which computes itself what follows, copied or not: a copy only lets
// it draft several tokens in one forward. How much is copied goes by what was seen so far.
constexpr int MATCHES = 16, TIMES = 64;

struct Lookup {
    int32_t longest, shortest, most;  // tokens to find again, and to copy
    uint32_t forwards;
    float share[MATCHES];  // of the tokens copied after a match of 1, 2, ... tokens (or more), how many it drafted as well
    float time[TIMES];     // nanoseconds of a forward of 1, 2, ... tokens; 0 was not seen
};

// How a drafter grows a tree (fly/runtime/executor.py: Growth): ``width`` candidates after each token of a level that is followed,
// of which the ``follow`` likeliest are followed; the ``nodes`` likeliest of all are proposed.
struct Growth {
    int32_t nodes, follow;
    Span<const int32_t> width;  // [levels]
};

// A condition of those that together excuse a token that the exact rule does not keep (fly/policies/conditions.py: Clause).
struct Clause {
    int32_t kind, negated, processed, count;
    double theta;
};

enum ClauseKind : int32_t { ENTROPY = 0, WINDOW = 1, ROOM_LEFT = 2, CONTROL = 3 };

// What the clauses said of one token: a bit each in ``held``; and -ln of the target's probability of an excused one.
struct Ask {
    int32_t row, round, node;
    uint32_t held;
    int32_t excused;
    double nats;
};

// The rule of a row: the exact rule, by coins of the row's own, and the clauses that must all hold to excuse a token that it
// does not keep.
struct Rule {
    int64_t seed;
    int32_t clause_at, clauses;  // of all that there are
    int32_t asks;                // such a token leaves the block open: only Python knows whether the rule excuses it
};

// The rules of some rows.
struct Rules {
    int32_t variant, vocab;
    Span<const Rule> rule;          // [B]
    Span<const Sampling> sampling;  // [B] how rows draw; none where all take the most likely
    Span<const Clause> clause;
    Span<const uint8_t> control;    // [V] which tokens are control tokens; needed where there are clauses
};

// Drafted blocks of some rows, round after round, and what is decided about them.
struct Blocks {
    int32_t k, most;              // the most tokens of a block; rounds
    Span<int64_t> drafted;        // [B, most, k]
    Span<int32_t> drafted_count;  // [B, most]
    Span<int32_t> parent;         // [B, most, k] the number of the node that each follows, -1 for the row's last token; none
                                  // where drafts are chains
    Span<int32_t> choice;         // [B, most, k + 1] the target's most likely tokens, NO_NUMBER where logits are NaN
    Span<int32_t> accepted;       // [B, most] out: drafted tokens that stand; 0 of an open block
    Span<int32_t> path;           // [B, most, k] out: their numbers; none where drafts are chains
    Span<int64_t> following;      // [B, most] out: the token after them; NO_NUMBER of an open block
    Span<Ask> ask;                // [at least B · (k + 1)] out; needed where there are clauses
    int32_t asks;                 // out
};

// A row of several rounds.
struct Going {
    int32_t length, room;      // tokens of the row; how many its pages hold
    int32_t left;              // tokens it may still emit
    int32_t k, context;        // tokens drafted a round (levels of a tree), and the longest text drafted for
    int32_t draft_start;       // tokens that the drafter has stored, in and out
    int32_t first;             // of a draft head: number of the first token that it holds
    Span<int64_t> text;        // [room + 1] the row's tokens, in and out
    Span<int32_t> copied;      // [room + 1] the tokens for a lookup, or none
    Span<const int64_t> stop;  // ids that end it
};

// Rounds of some rows: what goes in, and where it comes to.
struct Rounds {
    Span<Going> going;          // [B]; ``length`` and ``left`` are out as before the last round
    const Rules* rules;
    Blocks* blocks;             // out; as many columns as any row drafts tokens a round, or a tree has nodes
    Span<const int32_t> hurry;  // no further round begins while this is not 0; or none
    int64_t nanoseconds;        // nor after these
    Span<float> logits;         // [B · (k + 1), V] out, of the last round, one row's after another's
    Span<float> distributions;  // [B, k, V] out: what the last round's drafts were drawn from, those of the rows that drafted,
                                // ``longest`` each; none where they were not drawn
    int32_t longest, rounds;    // out
    int64_t elapsed[2], scoring[2], drafting[2];  // out: nanoseconds in all, in the target and in the drafter, of the
                                                  // first round and of the others
    Span<const Sure> sure;      // [B] where the drafter stops
    Span<const int32_t> state;  // hidden states after so many layers each are asked for, for draft heads
    int32_t read_before;        // out: tokens of the rounds before the last
    Span<const char> given;     // [late tokens, F] those before the tokens that a head has not stored, row by row
    Span<char> read;            // [most · B · (k + 1), F] out: of every round's tokens, each row's after another's; of a
                                // decided tree, first those that stand
    const Growth* growth;       // drafts are trees, which the drafter grows; null: chains
};

constexpr int32_t NO_NUMBER = -2;  // in place of a token or of how many are kept; -1 has other meanings there

}  // namespace fly
