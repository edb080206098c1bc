// Prompt lookup: find what followed the last time the text ended like this, and how many tokens it pays to copy. Knows
// nothing of models or calls.

// The expected nanoseconds of a forward of so many tokens. If that number was not seen yet, it is somewhat more than
// for the largest smaller number that was.
inline float time_of(const Lookup& lookup, int tokens) {
    int seen = min_of(tokens, TIMES);
    while (seen > 1 && !lookup.time[seen - 1]) seen--;
    const float time = lookup.time[seen - 1] ? lookup.time[seen - 1] : 1;
    return tokens > TIMES ? time * tokens / TIMES : time * (1 + 0.1f * (tokens - seen));
}

// Learns that a forward of so many tokens took so long. A forward that lost the processor meanwhile counts for at most
// twice the expected time. Every 1024 forwards it forgets all times, so that sizes which seemed slow are tried again.
inline void learn_time(Lookup* lookup, int tokens, float nanoseconds) {
    if (lookup->forwards++ % 1024 == 0) memset(lookup->time, 0, sizeof(lookup->time));
    const float most = 2 * time_of(*lookup, tokens);
    if (nanoseconds > most && most > 1000) nanoseconds = most;  // below 1000, no time is known yet
    if (tokens > TIMES) nanoseconds *= (float)TIMES / tokens;
    float& time = lookup->time[min_of(tokens, TIMES) - 1];
    time += time ? 0.25f * (nanoseconds - time) : nanoseconds;
}

// Finds the longest n-gram that ends a text of ``length`` tokens and occurred before (the latest occurrence), and copies the
// ``most`` tokens that followed it to the end of the text. Returns how many tokens match, or 0.
int look_up(const Lookup& lookup, int32_t* text, int length, int most) {
    constexpr int SOME = 32;
    const int32_t last = text[length - 1];
    int matched = 0, follows = 0;
    for (int to = length - 1; to > 0 && matched < lookup.longest; to -= SOME) {
        const int from = max_of(to - SOME, 0);
        if (to >= SOME) {  // vectors skip most of a text quickly
            int any = 0;
            for (int i = 0; i < SOME; i++) any |= text[from + i] == last;
            if (!any) continue;
        }
        for (int end = to - 1; end >= from && matched < lookup.longest; end--) {
            if (text[end] != last) continue;
            int n = 1;
            while (n < lookup.longest && n <= end && text[end - n] == text[length - 1 - n]) n++;
            if (n > matched && n >= lookup.shortest) matched = n, follows = end + 1;
        }
    }
    if (!matched) return 0;
    for (int i = 0; i < most; i++) text[length + i] = text[follows + i];
    while (matched < MATCHES && matched < follows && text[follows - 1 - matched] == text[length - 1 - matched]) matched++;
    return matched;
}

// The share of right tokens among those copied ``copied`` places after a match of ``matched`` tokens (interface.h:
// Lookup).
inline float& share_of(Lookup* lookup, int matched, int copied) {
    return lookup->share[min_of(matched + copied, MATCHES) - 1];
}
