// Rounds of speculative decoding in one call: draft, score, and verify what was drafted. Knows nothing of how a model
// computes its logits, nor of why a row goes through rounds.
#include "decide.h"
#include "trees.h"

using namespace fly;

namespace {

// The arrays of a forward over some of the rows of a batch, which are filled in one by one.
struct Packed {
    Batch batch;
    Span<int32_t> start, count, row;
    Span<int64_t> token, position;
    Span<Span<const int32_t>> tables;

    void deal(Dealer& from, int rows, int64_t tokens) {
        start = from.take<int32_t>(rows), count = from.take<int32_t>(rows), row = from.take<int32_t>(rows);
        tables = from.take<Span<const int32_t>>(rows);
        token = from.take<int64_t>(tokens), position = from.take<int64_t>(tokens);
    }

    // Begins again without rows, over the cache of ``of``.
    void clear(const Batch& of) {
        batch = of;
        batch.start = start, batch.count = count, batch.tables = tables, batch.token = token, batch.position = position;
        batch.rows = batch.tokens = 0;
    }

    // The tokens ``from`` to ``to`` of row ``b`` of ``of``, of which those before ``first`` are not held.
    void add(const Batch& of, int b, const int64_t* text, int from, int to, int first = 0) {
        const int i = batch.rows++;
        row[i] = b, start[i] = from - first, count[i] = to - from, tables[i] = of.tables[b];
        for (int at = from; at < to; at++) token[batch.tokens] = text[at], position[batch.tokens++] = at - first;
    }
};

// Rounds under way, and what only they need.
struct Play {
    Rounds* it;
    Blocks* blocks;
    Decider decider;
    Model *target, *drafter;
    const Batch *batch, *draft_batch;
    Lookup* lookup;
    const int rows, vocab, k;
    const bool heads;      // whether the drafter is a head, which drafts by hidden states
    int new_tokens = 0;    // of a round, at most
    long state_bytes = 0;  // of the target's hidden states of a token, where they are asked for
    int64_t spare = 0;     // slots that a round of trees needs after a row's tokens
    Arena arena;
    Packed scored, draft;
    Span<int32_t> limit, drafts, proposed, choice;  // drafts of each row, limit and proposed of each drafted for
    Span<int64_t> chain;
    Span<float> coins;
    Span<Sampling> drawing;
    Span<Sure> sure;
    Span<Span<const int64_t>> stop;
    Span<Span<const int32_t>> texts;
    // Of a draft head: what a forward is given of hidden states, and where those of each row's tokens lie that it has not
    // stored.
    Span<char> given;
    Span<const char*> states;
    Forest forest;  // where drafts are trees
    Span<uint8_t> mask;
    Span<Span<const uint8_t>> masks;

    Play(Rounds* rounds, Model* whose, const Batch* of, Model* who, const Batch* draft_of, Lookup* looks)
        : it(rounds), blocks(it->blocks), decider(it->rules, it->blocks), target(whose), drafter(who), batch(of),
          draft_batch(draft_of), lookup(looks), rows(of->rows), vocab(whose->shape.vocab), k(it->blocks->k),
          heads(who && who->shape.features) {}

    // Whether all that is read is there, and all that is written has room. An error or OK.
    int check(const Extent& extent) const {
        const Shape& shape = target->shape;
        const Growth* growth = it->growth;
        const int64_t wide = k + 1L, places = (int64_t)rows * blocks->most, features = it->state.count() * shape.width;
        if (const int bad = within("rows", rows, 1, MOST) ?: within("tokens of a round", rows * wide, 1, MOST) ?:
                            within("tokens of the target", target->tokens, vocab, vocab) ?:
                            within("vocab", it->rules->vocab, vocab, vocab) ?: holds("tables", batch->tables, rows) ?:
                            holds("going", it->going, rows) ?: holds("logits", it->logits, rows, wide, vocab) ?:
                            holds_or_none("hurry", it->hurry, 1) ?:
                            within("parents", blocks->parent.there(), growth != nullptr, growth != nullptr))
            return bad;
        if (features)
            if (const int bad = holds("read", it->read, places, wide, features, bytes_of_type(shape.hidden))) return bad;
        if (drafter)
            if (const int bad = within("rows of the draft", draft_batch->rows, rows, rows) ?: holds("sure", it->sure, rows) ?:
                                holds("tables of the draft", draft_batch->tables, rows) ?:
                                within("tokens of the drafter", drafter->tokens, 1, vocab) ?:
                                (growth ? OK : holds_or_none("distributions", it->distributions, rows, k, vocab)))
                return bad;
        if (heads)
            if (const int bad = within("features", features, drafter->shape.features, drafter->shape.features) ?:
                                within("their type", shape.hidden, drafter->shape.hidden, drafter->shape.hidden))
                return bad;
        if (growth)
            if (const int bad = within("nodes", growth->nodes, 1, k) ?: within("follow", growth->follow, 1, MOST) ?:
                                within("candidates", extent.candidates, 1, MOST) ?: within("drafters", drafter != nullptr, 1, 1))
                return bad;
        return OK;
    }

    // The same of a row.
    int check(const Going& row) const {
        return within("length", row.length, 1, MOST) ?: within("left", row.left, 1, MOST) ?: within("k", row.k, 0, k) ?:
               within("room", row.room, row.length + needs(row, row.left), MOST) ?: holds("text", row.text, row.room + 1L) ?:
               (lookup ? holds("copied", row.copied, row.room + 1L) : OK) ?: within("first", row.first, 0, MOST) ?:
               (drafter ? within("draft_start", row.draft_start, row.first, row.length - 1) : OK);
    }

    // Checks what is asked for, and makes room for it. An error or OK.
    int begin() {
        const Growth* growth = it->growth;
        const Extent extent(growth);
        if (const int bad = decider.begin(rows) ?: check(extent)) return bad;
        state_bytes = it->state.count() * target->shape.width * bytes_of_type(target->shape.hidden);
        new_tokens = rows * (k + 1);
        spare = growth ? most_of<int64_t>(growth->nodes, extent.followed) : 0;
        int64_t late = 0, behind = 0, room = 0, seen = 0;  // tokens of any forward of the draft, of its first; of a row, of all
        for (int b = 0; b < rows; b++) {
            const Going& row = it->going[b];
            if (const int bad = check(row)) return bad;
            if (drafter) behind += row.length - row.draft_start, late += row.length - row.draft_start + k + 1;
            room = most_of<int64_t>(room, row.room), seen += row.room;
        }
        if (const int bad = (heads ? holds("given", it->given, behind, state_bytes) : OK) ?:
                            (growth ? forest.make_room(growth, extent, drafter, variants[it->rules->variant], rows, room, late) : OK) ?:
                            lay_out(&arena, "rounds", false, [&](Dealer& from) {
                                const int trees = growth ? 1 : 0;
                                scored.deal(from, rows, new_tokens), draft.deal(from, rows, late);
                                limit = from.take<int32_t>(rows), drafts = from.take<int32_t>(rows);
                                proposed = from.take<int32_t>(rows), stop = from.take<Span<const int64_t>>(rows);
                                chain = from.take<int64_t>(new_tokens), choice = from.take<int32_t>(new_tokens);
                                coins = from.take<float>(new_tokens);
                                drawing = from.take<Sampling>(rows), sure = from.take<Sure>(rows);
                                texts = from.take<Span<const int32_t>>(rows), states = from.take<const char*>(rows);
                                given = from.take<char>(heads ? late : 0, state_bytes);
                                mask = from.take<uint8_t>(trees, seen, k + 1L);
                                masks = from.take<Span<const uint8_t>>(trees, rows);
                            }))
            return bad;
        const char* from = it->given;
        for (int b = 0; heads && b < rows; b++) {
            states[b] = from;
            from += (it->going[b].length - it->going[b].draft_start) * state_bytes;
        }
        return OK;
    }

    // Slots that a row's next round needs after its tokens, of which ``left`` may follow.
    int64_t needs(const Going& row, int64_t left) const { return it->growth ? spare : least_of<int64_t>(row.k, left - 1); }

    // Whether ``token`` ends row ``b``.
    bool ends(int b, int64_t token) const {
        bool found = false;
        for (const int64_t stop : it->going[b].stop) found |= stop == token;
        return found;
    }

    // Where what row ``b`` comes to in this round lies, and what it drafts.
    long place(int b) const { return decider.place(b, it->rounds); }
    int64_t* drafted_of(int b) const { return blocks->drafted + place(b) * k; }
    int32_t* parents_of(int b) const { return blocks->parent + place(b) * k; }
    int32_t* path_of(int b) const { return blocks->path + place(b) * k; }

    // Where the hidden states of this round's tokens lie.
    Span<char> read() const {
        const int64_t before = it->read_before * (int64_t)state_bytes;
        return {it->read.at + before, it->read.bytes - before};
    }

    // Which rows draft, and what is copied where nobody else drafts.
    void plan() {
        it->longest = 0;
        draft.clear(drafter ? *draft_batch : *batch);
        for (int b = 0; b < rows; b++) {
            const Going& row = it->going[b];
            const int most = least_of(least_of(row.k, row.left - 1), row.context - row.length);
            drafts[b] = 0;
            if (most <= 0) continue;
            if (drafter) {
                const int i = draft.batch.rows;
                const long known = draft.batch.tokens * state_bytes;
                if (heads) copy(given + known, states[b], (row.length - row.draft_start) * state_bytes);
                draft.add(*draft_batch, b, row.text, row.draft_start, row.length, row.first);
                texts[i] = row.copied;
                limit[i] = most, it->longest = most_of(it->longest, most);
            } else if (lookup && target->variant->look_up(*lookup, row.copied, row.length, most)) {
                int64_t* drafted = drafted_of(b);
                for (bool ended = false; drafts[b] < most && !ended; drafts[b]++) {
                    const int at = drafts[b];
                    drafted[at] = row.text[row.length + at] = row.copied[row.length + at];
                    ended = ends(b, drafted[at]);
                }
            }
        }
    }

    // Has the drafter draft. Returns its error or OK.
    int propose() {
        const int asked = draft.batch.rows;
        for (int i = 0; i < asked; i++) {
            const int b = draft.row[i];
            stop[i] = it->going[b].stop, sure[i] = it->sure[b];
            if (!it->rules->sampling.there()) continue;
            const int64_t seed = derived(it->rules->rule[b].seed, it->going[b].length);
            drawing[i] = it->rules->sampling[b];
            for (int n = 0; n < limit[i]; n++) uniforms(seed, it->going[b].length + n, SAMPLE, 1, coins + i * it->longest + n);
        }
        if (it->growth) return grow();
        if (const int error = fly_draft(drafter, &draft.batch, it->longest, limit, stop, chain, proposed,
                                        it->rules->sampling.there() ? drawing : Span<Sampling>(), coins, it->distributions, lookup,
                                        texts, sure, given))
            return error;
        for (int i = 0; i < asked; i++) {
            const int b = draft.row[i], n = drafts[b] = proposed[i];
            Going& row = it->going[b];
            const int64_t* tokens = chain + i * it->longest;
            row.draft_start = row.length + (heads ? 0 : n - 1);  // the last is not stored; a head's own features do not stay
            copy(drafted_of(b), tokens, n);
            copy(row.text + row.length, tokens, n);
        }
        return OK;
    }

    // The same of trees.
    int grow() {
        if (const int error = forest.grow(draft.batch, limit, stop, given)) return error;
        for (int i = 0; i < draft.batch.rows; i++) {
            const int b = draft.row[i], n = drafts[b] = forest.propose(i, drafted_of(b), parents_of(b));
            Going& row = it->going[b];
            row.draft_start = row.length;
            copy(row.text + row.length, drafted_of(b), n);
        }
        return OK;
    }

    // Has the target score the rows' last tokens and what was drafted. Returns its error or OK.
    int score() {
        scored.clear(*batch);
        uint8_t* sees = mask;
        for (int b = 0; b < rows; b++) {
            const int length = it->going[b].length, n = drafts[b], first = scored.batch.tokens + 1;
            scored.add(*batch, b, it->going[b].text, length - 1, length + n);
            if (!it->growth) continue;
            const int32_t* parents = parents_of(b);
            masks[b] = n ? Span<uint8_t>(sees, (n + 1L) * (length + n)) : Span<uint8_t>();
            for (int t = -1; t < n && n; t++, sees += length + n) {
                see(sees, length, n, parents, t);
                if (t >= 0) scored.position[first + t] = scored.position[first + parents[t]] + 1;
            }
        }
        if (it->growth) scored.batch.masks = masks;
        return fly_score(target, &scored.batch, {}, it->logits, choice, it->state, read());
    }

    // Of row ``b``'s tree, which begins with its last token at ``at`` in the target's forward and is number ``i`` of the
    // drafter's (or -1), ``n`` tokens stand: all that is stored of them moves up to where it belongs.
    void settle(int b, int at, int i, int n) {
        Going& row = it->going[b];
        const int64_t* drafted = drafted_of(b);
        const int32_t* path = path_of(b);
        const Span<char> states = read();
        for (int t = 0; t < n; t++) {
            row.text[row.length + t] = drafted[path[t]];
            move_stored(*batch, target->shape, batch->tables[b], row.length + path[t], row.length + t);
            if (state_bytes && path[t] != t)
                memcpy(states + (at + 1 + t) * state_bytes, states + (at + 1 + path[t]) * state_bytes, state_bytes);
        }
        // A head's own features do not stay.
        if (i >= 0 && !heads) row.draft_start += forest.keep(i, draft.batch, path, n, row.length);
    }
};

}  // namespace

// Rounds of the rows of ``batch``, which the target has stored but for their last tokens: draft, verify, decide, emit, again
// and again. Without a ``drafter`` a ``lookup`` drafts what followed the last time, with neither nobody does.
//
// The Python side (fly/backends/cpu/rounds.py) calls it once for a step, and lets go of the interpreter meanwhile. Nothing
// interrupts a round. After one they end if a row emits a stop id or all that is left of it, if the pages of one have no room
// for the next, if a block stays open, or if the time is over or somebody is in a ``hurry``. What stands of a tree is stored
// in order at the end of its round, with its hidden states; of an open tree, all tokens are, as they were drafted.
EXPORT int fly_rounds(Model* target, const Batch* batch, Model* drafter, const Batch* draft_batch, Lookup* lookup,
                      Rounds* it) {
    const int64_t begin = nanoseconds();
    Play play(it, target, batch, drafter, draft_batch, lookup);
    if (const int error = play.begin()) return error;
    Blocks* const blocks = it->blocks;
    const int rows = play.rows;
    it->rounds = it->read_before = 0;
    for (int i = 0; i < 2; i++) it->elapsed[i] = it->scoring[i] = it->drafting[i] = 0;
    for (int64_t now = begin;;) {
        const int64_t from = now;
        const bool later = it->rounds > 0;
        const auto lap = [&] {
            const int64_t since = now;
            return (now = nanoseconds()) - since;
        };
        // Propose: the drafter's tokens, or what is copied, or nothing.
        play.plan();
        const int asked = play.draft.batch.rows;
        if (asked)
            if (const int error = play.propose()) return error;
        const int64_t proposing = lap();
        if (asked || lookup) it->drafting[later] += proposing;
        // Verify: one forward of the target over all rows' last tokens and drafts.
        if (const int error = play.score()) return error;
        it->scoring[later] += lap();
        bool over = it->rounds + 1 == blocks->most;
        for (int b = 0, at = 0, i = 0; b < rows; at += play.drafts[b] + 1, b++) {
            const Going& row = it->going[b];
            const long place = play.place(b);
            const bool drafted = i < asked && play.draft.row[i] == b;
            const float* distributions = drafted ? it->distributions.at : nullptr;
            if (distributions) distributions += (long)i * it->longest * play.vocab;
            const int tree = drafted ? i : -1;
            i += drafted;
            // Decide: what stands of the row's draft, and which token follows.
            blocks->drafted_count[place] = play.drafts[b];
            memcpy(blocks->choice + place * (blocks->k + 1), play.choice + at, (play.drafts[b] + 1) * sizeof(int32_t));
            if (play.heads) play.states[b] = play.read() + at * play.state_bytes;
            play.decider.decide(b, it->rounds, row.length, it->logits + (long)at * play.vocab, distributions);
            if (blocks->following[place] < 0) {
                over = true;  // open: all stays as it was drafted
                continue;
            }
            // Emit: the row's text grows, and what is stored of a tree moves to where it belongs.
            const int n = blocks->accepted[place];
            if (it->growth) play.settle(b, at, tree, n);
            row.text[row.length + n] = blocks->following[place];
            for (int t = row.length; t <= row.length + n; t++) over |= play.ends(b, row.text[t]);
            over |= n + 1 >= row.left || row.length + n + 1 + play.needs(row, row.left - n - 1) > row.room;
        }
        it->rounds++;
        lap();
        it->elapsed[later] += now - from;
        over |= now - begin >= it->nanoseconds;
        over |= it->rules->clause.there() && blocks->asks + play.new_tokens > blocks->ask.count();
        over |= it->hurry.there() && __atomic_load_n(it->hurry.at, __ATOMIC_RELAXED);
        if (over) return OK;
        it->read_before += play.scored.batch.tokens;
        for (int b = 0; b < rows; b++) {
            Going& row = it->going[b];
            const int before = row.length, n = blocks->accepted[play.decider.place(b, it->rounds - 1)];
            row.length += n + 1, row.left -= n + 1;
            row.draft_start = least_of(row.draft_start, before + n);
            for (int t = before; lookup && t < row.length; t++) row.copied[t] = (int32_t)row.text[t];
        }
    }
}
