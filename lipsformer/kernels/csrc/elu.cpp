// ELU: x where it is positive, and e^x - 1 elsewhere.
#include "rows.h"

namespace {

template <class Value>
void elu(const Value *x, Value *y, int64_t n, int64_t threads) {
    if (n < ALONE) threads = 1;
    parallel_for(threads, (n + BLOCK - 1) / BLOCK, [=](int64_t block) {
        const int64_t start = block * BLOCK;
        each(std::min(BLOCK, n - start), [=](int64_t i, auto lanes) {
            const vec value = lanes.load(x + start + i);
            lanes.store(y + start + i, value > 0.0f ? value : expm1(value));
        });
    });
}

}  // namespace

EXPORT(elu)
