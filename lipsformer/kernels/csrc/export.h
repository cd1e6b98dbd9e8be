// The functions that Python calls. It finds them by pointers that have their names and types.
#pragma once

#include "vec.h"

// The two instances of a function template, as NAME_float32 and NAME_bfloat16.
#define EXPORT(function)                           \
    extern "C" {                                   \
    auto *function##_float32 = function<float>;    \
    auto *function##_bfloat16 = function<bf16>;    \
    }

// A function of floats only, as NAME_float32.
#define EXPORT_FLOAT32(function)           \
    extern "C" {                           \
    auto *function##_float32 = function;   \
    }
