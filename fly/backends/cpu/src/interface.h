// Structures that Python hands over, with the same layout as in fly/backends/cpu/library.py. After any change here,
// change ``fly_abi`` too. Knows nothing of how a model is packed or run.
//
// Shapes, here and in all other sources: T packed tokens, C hidden width, N outputs and K inputs of a matrix, H query
// heads, G key/value heads, D head width, S stored tokens of a row, Z tokens a page, B rows, V vocabulary.
#pragma once
#include <stdint.h>

// For functions that must not pass vectors through memory, and must not be linked once for all variants.
#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace fly {

// Memory that a caller hands over: its address and its size in bytes, which is below 0 if there is no memory. The
// function that is called checks that it is large enough (library.h: holds).
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
    // The first ``n`` values.
    ALWAYS_INLINE Span first(int64_t n) const { return {at, n < count() ? n * (int64_t)sizeof(T) : bytes}; }
};

// W8A8 matrices hold int8. Their inputs are rounded to 8 bits row by row, so that products multiply whole numbers.
// GROUPED matrices hold unsigned numbers of 4 or 8 bits in groups along the input, each with a scale and a minimum;
// their inputs are rounded to 8 bits in groups of 32.
enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1, W8A8 = 2, GROUPED = 3 };

// The kinds of Markov heads (fly/models/dflash.py: MarkovHead).
enum Markov : int32_t { UNCORRECTED = 0, VANILLA = 1, GATED = 2, RECURRENT = 3 };

// Rows of a matrix in the blocks of a GGUF file. ``kind`` is the file format's number for their type (blocks.cpp lists them).
// Each row begins with a new block.
struct Stored {
    int32_t kind, rows;
    Span<const char> data;
};

struct Shape {
    int32_t width, intermediate, layers, heads, kv_heads, head_dim, vocab, positions;
    int32_t weights;  // Type of the matrices
    int32_t hidden;   // Type of the hidden states that go in and out, and of an untied embedding
    int32_t gelu;     // 1: the activation is GELU by tanh; 0: SiLU
    int32_t ropes;    // tables of cosines and sines
    int32_t features; // draft heads (fly/models/eagle.py): values of the target's hidden states; 0 for a whole model
    int32_t normed;   // draft heads: the residual is the normed feature
    int32_t parallel; // draft heads: 1: they draft all tokens in one forward, by ``mask`` tokens after the text (P-EAGLE)
    // Block drafters (fly/models/dflash.py) are draft heads that draft a whole block in one forward.
    int32_t block;       // places of a block, the anchor's included; 0: no block drafter
    int32_t first;       // the first place that drafts a token
    int32_t mask;        // the token at all places but the anchor's, or after the text
    int32_t markov;      // Markov: how logits are corrected by the token before
    int32_t rank;        // values of a token's row of the Markov head
    int32_t confidence;  // values that the confidence head reads: C, or C + rank; 0: there is none
    float eps;
    float scale;      // factor of products of queries and keys
    float embedding;  // factor of embeddings
};

// The tokens of a forward, and the pages of their rows.
struct Batch {
    int32_t rows, tokens;
    Span<const int64_t> token, position;     // [T]
    Span<const int32_t> start, count;        // [B]
    Span<const Span<const int32_t>> tables;  // [B] each row's pages
    Span<const Span<const uint8_t>> masks;   // [B] [count, start + count] which tokens each new one sees; none: causal
    Span<char> keys, values;                 // [layers, slots, G, D]
    int64_t layer_stride;                    // in values
    int32_t cache_type, page;
    int32_t threads;
};

// How a row draws tokens (fly/runner/sampling.py: ProcessedDistribution). At temperature 0 it takes the most likely
// one.
struct Sampling {
    float temperature, top_p, floor;  // floor: temperature · ln min_p; -inf: off
    int32_t top_k;                    // 0: off
};

// Where a drafter stops (fly/runner/drafting.py: DraftSpec): after a token if the largest probability there was below
// ``confidence``, or if the product of the largest probabilities so far is below ``reach``. 0 never stops it.
struct Stops {
    float confidence, reach;

    bool any() const { return confidence > 0 || reach > 0; }
};

// Prompt lookup for a drafter (fly/drafts/ngram.py). It changes no token: the drafter verifies copied tokens by its own
// logits, and saves forwards if they are right. The share of right copies so far decides how many tokens are copied.
constexpr int MATCHES = 16, TIMES = 64;

struct Lookup {
    int32_t longest, shortest, most;  // the longest and shortest match, and the most tokens to copy
    uint32_t forwards;
    float share[MATCHES];  // how many of the tokens copied after a match of 1, 2, ... tokens were right
    float time[TIMES];     // nanoseconds of a forward of 1, 2, ... tokens; 0: not seen yet
};

// A single condition on a drafted token (fly/policies/conditions.py: Clause). ``kind`` is a ClauseKind, and ``value`` holds
// the structure of that kind (clauses.h), whose first value is 1 if the condition is negated.
constexpr int MOST_VALUES = 4;

struct Clause {
    int32_t kind;
    double value[MOST_VALUES];
};

// A mismatch, a drafted token that the exact rule rejects, and which clauses held for it.
struct Mismatch {
    int32_t row, round, node;  // node: its number in the draft
    uint32_t held;             // a bit for each clause
    int32_t excused;
    double nats;               // excused tokens: -ln of the target's probability; else 0
    double regret;             // excused tokens: what the largest logit exceeds their own by; else 0
};

// The rule of a row, with coins from the row's seed. It is the exact rule, and a mismatch is excused if the clauses say so. Or,
// with ``is_gate``, a token is kept if they say so, whatever the exact rule says (fly/policies/gates.py: _Gate).
//
// The clauses that hold are the bits of a number. ``table`` has a bit for each such number, which is set if those clauses
// are enough (fly/policies/conditions.py: Condition.table). Of more than MOST_TABLED clauses, all must hold.
constexpr int MOST_CLAUSES = 31, MOST_TABLED = 6;

struct Rule {
    int64_t seed;
    uint64_t table;
    int32_t clause_at, clauses;  // the number of the first clause, and how many clauses
    int32_t in_python;           // only Python knows what the rule excuses, so a mismatch leaves the block open
    int32_t unknown;             // only Python knows what the rule keeps, so every block stays open
    int32_t is_gate;
};

// The rules of some rows.
struct Rules {
    int32_t variant, vocab;
    Span<const Rule> rule;          // [B]
    Span<const Sampling> sampling;  // [B] how rows draw; none if all take the most likely token
    Span<const Clause> clause;
    Span<const uint8_t> control;    // [V] which tokens are control tokens; needed if there are clauses
    Span<const uint8_t> mask;       // [as many as clauses name, V] other sets of tokens
};

// Drafted blocks of some rows, round after round, and the decisions about them.
struct Blocks {
    int32_t k, most;              // the most tokens of a block, and the most rounds
    Span<int64_t> drafted;        // [B, most, k]
    Span<int32_t> drafted_count;  // [B, most]
    Span<int32_t> choice;         // [B, most, k + 1] the target's most likely tokens, NO_NUMBER where logits are NaN
    Span<int32_t> accepted;       // [B, most] out: how many drafted tokens are kept; 0 if the block is open
    Span<int64_t> following;      // [B, most] out: the token after the kept ones; NO_NUMBER if the block is open
    Span<Mismatch> mismatch;      // [at least B · (k + 1)] out; needed if there are clauses
    int32_t mismatches;           // out: how many there are
};

// A row in several rounds.
struct RoundRow {
    int32_t length, room;      // tokens of the row; tokens that its pages have room for
    int32_t left;              // tokens it may still emit
    int32_t k, context;        // the most tokens of a draft, and the longest text to draft for
    int32_t draft_start;       // tokens that the drafter has stored, in and out
    int32_t first;             // draft heads: number of the first token that the head has cached
    Span<int64_t> text;        // [room + 1] the row's tokens, in and out
    Span<int32_t> copied;      // [room + 1] the same for a lookup, or none
    Span<const int64_t> stop;  // token ids that end the row
};

// The arguments and results of ``fly_rounds`` (rounds.cpp).
struct Rounds {
    Span<RoundRow> row;         // [B]; ``length`` and ``left`` come out with their values before the last round
    const Rules* rules;
    Blocks* blocks;             // out; k is the most tokens that any row drafts in a round
    Span<const int32_t> hurry;  // no further round begins unless this is 0; may be none
    int64_t nanoseconds;        // no further round begins after this time
    Span<float> logits;         // [B · (k + 1), V] out: the last round's, row after row
    Span<float> distributions;  // [B, k, V] out: what the last round's drafts were drawn from, ``longest`` for each row that
                                // drafted; none if drafts are not drawn
    Span<const Span<float>> draft_logits;  // [B] [k, V] out: the drafter's logits at each token of a row's last draft;
                                           // none for rows that need none
    int32_t longest, rounds;    // out: the most tokens that a row could draft in the last round; how many rounds
    int64_t elapsed[2], scoring[2], drafting[2];  // out: nanoseconds of the first round and of all others: in all, in the
                                                  // target, and in the drafter
    Span<const Stops> stops;    // [B] where the drafter stops
    Span<const int32_t> state;  // the numbers of layers after which hidden states are wanted, for draft heads
    int32_t read_before;        // out: tokens fed in the rounds before the last
    int32_t head_drafts;        // draft heads: the most tokens that they draft. A lookup beside them may go on to a row's k
    Span<const char> head_states;  // [tokens, F] hidden states before each token that a head has not stored, row by row
    Span<char> read;            // [most · B · (k + 1), F] out: hidden states of every round's tokens, row after row
};

constexpr int32_t NO_NUMBER = -2;  // stands for a missing token or count, where -1 has another meaning

}  // namespace fly
