// Passes over the rows of a map of floats or of bfloat16, which are computed in float.
//
// Sums over rows are taken in parts that depend on the shape alone and are added in order, so the
// results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <vector>

#include "export.h"
#include "parallel.h"

constexpr int64_t ALONE = 1 << 15;  // floats up to which one thread is faster
constexpr int64_t BLOCK = 1 << 12;  // numbers of a map that is taken as one long row
constexpr int64_t PART = 64;        // least rows of a part
constexpr int64_t PARTS = 64;

struct Whole {
    template <class Value> vec load(const Value *p) const { return ::load(p); }
    template <class Value> void store(Value *p, vec x) const { ::store(p, x); }
};

struct Rest {
    int64_t n;
    template <class Value> vec load(const Value *p) const { return load_first(p, n); }
    template <class Value> void store(Value *p, vec x) const { store_first(p, x, n); }
};

// step(i, lanes) for every vector of a row; lanes loads zeros behind the row's end.
template <class Step>
inline void each(int64_t n, Step step) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) step(i, Whole{});
    if (i < n) step(i, Rest{n - i});
}

// The parts into which rows are summed.
struct Parts {
    int64_t rows, count;
    explicit Parts(int64_t rows) : rows(rows), count(std::clamp<int64_t>(rows / PART, 1, PARTS)) {}
    int64_t begin(int64_t part) const { return rows * part / count; }
};

inline void add_parts(const float *parts, int64_t count, int64_t n, float *total) {
    for (int64_t part = 0; part < count; ++part)
        for (int64_t i = 0; i < n; ++i) total[i] += parts[part * n + i];
}
