// The kernels that run where the tensors land: a copy between addresses of any alignment, and casts between
// element types. Compiled by testkit/kernels to the images in cuda/kernels and hip/kernels, one for each architecture.
//
// Every kernel takes the device address of an array of `Segment`s. The grid is (blocks that share a segment,
// segments, 1) and the block is (threads, 1, 1); any number of either computes the same bytes. A block of 256
// threads fits every GPU, however many registers a driver gives the kernel. Nothing is included, because
// NVRTC compiles this without the toolkit's headers.
//
// The same source runs on a CPU when HOISTWAY_HOST_KERNELS is defined, so that a machine without a GPU tests
// these very lines. Whoever compiles it that way, as C++17, defines
//
//     thread_local WlIndex blockIdx, threadIdx, gridDim, blockDim;
//     extern "C" void wl_load_bytes(unsigned long long address, void* into, unsigned size);
//     extern "C" void wl_store_bytes(unsigned long long address, const void* from, unsigned size);
//
// sets the four indices before each call, and finds the kernels by name with `hoistway_kernel`. Every access
// to global memory arrives there, in the width and at the address that a GPU would use: 1, 2, 4, 8 or 16
// bytes, at a multiple of as many. A little-endian CPU is assumed, as every host of a GPU is one.

#ifdef HOISTWAY_HOST_KERNELS

#define __global__
#define __device__

struct WlIndex {
    unsigned x, y, z;
};
extern thread_local WlIndex blockIdx, threadIdx, gridDim, blockDim;

extern "C" void wl_load_bytes(unsigned long long address, void* into, unsigned size);
extern "C" void wl_store_bytes(unsigned long long address, const void* from, unsigned size);

#endif

#ifdef __AMDGCN__

// Clang compiles this as plain C++ for AMD's devices, without ROCm and its headers.
#define __global__ __attribute__((amdgpu_kernel, amdgpu_flat_work_group_size(1, 256)))
#define __device__

struct WlIndex {
    unsigned x, y;
};
#define threadIdx (WlIndex{__builtin_amdgcn_workitem_id_x(), 0})
#define blockIdx (WlIndex{__builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y()})
#define blockDim (WlIndex{__builtin_amdgcn_workgroup_size_x(), 1})
#define gridDim (WlIndex{__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(), 0})

#endif

namespace {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// The widest access a GPU makes in one instruction.
struct alignas(16) Quad {
    u32 word[4];
};

// Bytes for a copy, elements for a cast.
struct Segment {
    u64 source, destination, count;
};

#ifdef HOISTWAY_HOST_KERNELS

template <class T> T wl_load(u64 address) {
    T value;
    wl_load_bytes(address, &value, sizeof(T));
    return value;
}
template <class T> void wl_store(u64 address, T value) { wl_store_bytes(address, &value, sizeof(T)); }

u32 leading_zeros(u32 value) { return __builtin_clz(value); }

#elif defined(__AMDGCN__)

// By way of global memory's address space: an access that may be to any other is slower.
#define WL_GLOBAL __attribute__((address_space(1)))
template <class T> T wl_load(u64 address) { return *(const T*)(const WL_GLOBAL T*)address; }
template <class T> void wl_store(u64 address, T value) { *(T*)(WL_GLOBAL T*)address = value; }

u32 leading_zeros(u32 value) { return __builtin_clz(value); }

#else

template <class T> __device__ T wl_load(u64 address) { return *reinterpret_cast<const T*>(address); }
template <class T> __device__ void wl_store(u64 address, T value) { *reinterpret_cast<T*>(address) = value; }

__device__ u32 leading_zeros(u32 value) { return __clz(value); }

#endif

__device__ Segment my_segment(u64 table) {
    const u64 entry = table + blockIdx.y * u64(sizeof(Segment));
    return {wl_load<u64>(entry), wl_load<u64>(entry + 8), wl_load<u64>(entry + 16)};
}

// Shares `items` among the threads of a segment; neighbours take neighbouring items, so that their accesses
// coalesce. `Batch` items are taken before the first is put: the compiler can't know that the two sides don't
// overlap, and would otherwise begin no load before the last store.
template <u32 Batch, class Mover> __device__ void share_out(const Mover& mover, u64 items) {
    const u64 stride = u64(gridDim.x) * blockDim.x;
    u64 item = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if constexpr (Batch > 1) {
        for (; item + (Batch - 1) * stride < items; item += Batch * stride) {
            typename Mover::Held held[Batch];
            for (u32 i = 0; i < Batch; i++) held[i] = mover.take(item + i * stride);
            for (u32 i = 0; i < Batch; i++) mover.put(item + i * stride, held[i]);
        }
    }
    for (; item < items; item += stride) mover.put(item, mover.take(item));
}

// ---- Copy ----

template <class Word> struct CopyWords {
    using Held = Word;
    u64 source, destination;

    __device__ Held take(u64 item) const { return wl_load<Word>(source + item * sizeof(Word)); }
    __device__ void put(u64 item, Held held) const {
        wl_store<Word>(destination + item * sizeof(Word), held);
    }
};

// Words whose source lies across two aligned ones. Both hold a byte of the segment, because the source is
// misaligned: so nothing is read outside the words that the segment touches.
struct CopyAcross {
    using Held = u32;
    u64 source, destination;

    __device__ Held take(u64 item) const {
        const u64 below = (source & ~u64(3)) + item * 4;
        const u64 both = wl_load<u32>(below) | u64(wl_load<u32>(below + 4)) << 32;
        return u32(both >> (source & 3) * 8);
    }
    __device__ void put(u64 item, Held held) const { wl_store<u32>(destination + item * 4, held); }
};

// Bytes up to the first aligned word of the destination, words, and the bytes after the last.
template <class Words> __device__ void copy_in_words(const Segment& segment) {
    using Word = typename Words::Held;
    const u64 to_boundary = (0 - segment.destination) & (sizeof(Word) - 1);
    const u64 head = to_boundary < segment.count ? to_boundary : segment.count;
    const u64 words = (segment.count - head) / sizeof(Word);
    const u64 tail = head + words * sizeof(Word);
    share_out<1>(CopyWords<u8>{segment.source, segment.destination}, head);
    share_out<4>(Words{segment.source + head, segment.destination + head}, words);
    share_out<1>(CopyWords<u8>{segment.source + tail, segment.destination + tail}, segment.count - tail);
}

__device__ void copy(const Segment& segment) {
    const u64 apart = segment.source - segment.destination;
    if (apart % 16 == 0) {
        copy_in_words<CopyWords<Quad>>(segment);
    } else if (apart % 8 == 0) {
        copy_in_words<CopyWords<u64>>(segment);
    } else if (apart % 4 == 0) {
        copy_in_words<CopyWords<u32>>(segment);
    } else {
        copy_in_words<CopyAcross>(segment);
    }
}

// ---- Element types ----
//
// Integers only, since floating-point units differ in what they do to NaNs and subnormals.

// What is known of a type is in functions: as variables, NVRTC would write each of them into the PTX.
template <class Word, u32 Exponent, u32 Fraction> struct Format {
    using Bits = Word;

    __device__ static constexpr u32 exponent_bits() { return Exponent; }
    __device__ static constexpr u32 fraction_bits() { return Fraction; }
    __device__ static constexpr u32 bias() { return (1u << (Exponent - 1)) - 1; }
    __device__ static constexpr u32 sign() { return 1u << (Exponent + Fraction); }
    __device__ static constexpr u32 infinity() { return ((1u << Exponent) - 1) << Fraction; }
    __device__ static constexpr u32 nan() { return infinity() | 1u << (Fraction - 1); }
    __device__ static constexpr bool is_nan(u32 magnitude) { return magnitude > infinity(); }
    __device__ static constexpr bool is_infinite(u32 magnitude) { return magnitude == infinity(); }
};

struct f32 : Format<u32, 8, 23> {};
struct f16 : Format<u16, 5, 10> {};
struct bf16 : Format<u16, 8, 7> {};
struct f8e5m2 : Format<u8, 5, 2> {};

// The finite-only variant: no infinities, and a NaN only where all bits but the sign are set.
struct f8e4m3 : Format<u8, 4, 3> {
    __device__ static constexpr bool is_nan(u32 magnitude) { return magnitude == 0x7f; }
    __device__ static constexpr bool is_infinite(u32) { return false; }
};

// The magnitude of a finite number in a type with more exponent bits and no fewer fraction bits.
template <class Source, class Target> __device__ u32 widen_finite(u32 magnitude) {
    constexpr u32 more_fraction = Target::fraction_bits() - Source::fraction_bits();
    constexpr u32 rebias = Target::bias() - Source::bias();
    // A subnormal becomes normal: its leading one moves up to be the implicit bit, which as part of the sum
    // adds one to the exponent. Without branches, since neighbours rarely agree on one.
    constexpr u32 zeros_if_normal = 31 - Source::fraction_bits();
    const u32 zeros = leading_zeros(magnitude | 1);
    const u32 shift = zeros > zeros_if_normal ? zeros - zeros_if_normal : 0;
    const u32 result = (magnitude << (shift + more_fraction)) + ((rebias - shift) << Target::fraction_bits());
    return magnitude == 0 ? 0 : result;
}

// A cast to a type that holds each value of the source exactly.
template <class Source, class Target> __device__ u32 widen(u32 bits) {
    const u32 sign = (bits & Source::sign()) * (Target::sign() / Source::sign());
    const u32 magnitude = bits & (Source::sign() - 1);
    u32 result;
    if constexpr (Source::exponent_bits() == Target::exponent_bits()) {
        result = magnitude << (Target::fraction_bits() - Source::fraction_bits());
    } else {
        result = widen_finite<Source, Target>(magnitude);
        result = Source::is_infinite(magnitude) ? Target::infinity() : result;
    }
    return sign | (Source::is_nan(magnitude) ? Target::nan() : result);
}

// Drops `shift` bits, to nearest, ties to even. A carry out of the fraction moves into the exponent, which is
// the right result up to and including infinity.
__device__ u32 round_off(u32 value, u32 shift) {
    return (value + (1u << (shift - 1)) - 1 + ((value >> shift) & 1)) >> shift;
}

// A cast to a type with fewer fraction bits and no more exponent bits.
template <class Source, class Target> __device__ u32 narrow(u32 bits) {
    constexpr u32 less_fraction = Source::fraction_bits() - Target::fraction_bits();
    const u32 sign = (bits & Source::sign()) / (Source::sign() / Target::sign());
    const u32 magnitude = bits & (Source::sign() - 1);
    u32 result;
    if constexpr (Source::exponent_bits() == Target::exponent_bits()) {
        result = round_off(magnitude, less_fraction);
    } else {
        constexpr u32 rebias = Source::bias() - Target::bias();
        constexpr u32 implicit = 1u << Source::fraction_bits();
        const u32 exponent = magnitude >> Source::fraction_bits();
        // A subnormal loses a bit more for each power of two below the smallest normal number. All is lost
        // long before 31, which is as far as a shift goes.
        const bool subnormal = exponent <= rebias;
        const u32 lost = less_fraction + 1 + rebias - exponent;
        const u32 shift = !subnormal ? less_fraction : lost < 31 ? lost : 31;
        const u32 significand = subnormal ? (magnitude & (implicit - 1)) | implicit
                                          : magnitude - (rebias << Source::fraction_bits());
        result = round_off(significand, shift);
        result = result < Target::infinity() ? result : Target::infinity();
    }
    return sign | (Source::is_nan(magnitude) ? Target::nan() : result);
}

// ---- Cast ----

template <class Source, class Target> __device__ typename Target::Bits cast_one(typename Source::Bits bits) {
    constexpr bool exact = Source::exponent_bits() <= Target::exponent_bits() &&
                           Source::fraction_bits() <= Target::fraction_bits();
    using Bits = typename Target::Bits;
    if constexpr (exact) {
        return Bits(widen<Source, Target>(bits));
    } else if constexpr (sizeof(Bits) < sizeof(typename Source::Bits)) {
        return Bits(narrow<Source, Target>(bits));
    } else {
        // f32 holds both exactly: so only the second step rounds.
        return Bits(narrow<f32, Target>(widen<Source, f32>(bits)));
    }
}

template <u32 Size> struct WordOf;
template <> struct WordOf<1> { using Word = u8; };
template <> struct WordOf<2> { using Word = u16; };
template <> struct WordOf<4> { using Word = u32; };
template <> struct WordOf<8> { using Word = u64; };
template <> struct WordOf<16> { using Word = Quad; };

template <class Part, class Word> __device__ Part part_of(const Word& word, u32 index) {
    return Part(word >> index * sizeof(Part) * 8);
}
template <class Part> __device__ Part part_of(const Quad& quad, u32 index) {
    constexpr u32 parts = 4 / sizeof(Part);
    return part_of<Part>(quad.word[index / parts], index % parts);
}

template <class Part, class Word> __device__ void set_part(Word& word, u32 index, Part part) {
    word = Word(word | Word(part) << index * sizeof(Part) * 8);
}
template <class Part> __device__ void set_part(Quad& quad, u32 index, Part part) {
    constexpr u32 parts = 4 / sizeof(Part);
    set_part(quad.word[index / parts], index % parts, part);
}

template <class Word, class Part> __device__ Word load_in_parts(u64 address) {
    if constexpr (sizeof(Word) <= sizeof(Part)) {
        return wl_load<Word>(address);
    } else {
        Word word = {};
        for (u32 i = 0; i < sizeof(Word) / sizeof(Part); i++) {
            set_part(word, i, wl_load<Part>(address + i * sizeof(Part)));
        }
        return word;
    }
}

// Elements cast together. Only the load depends on where the source lies, so that the arithmetic, which is
// most of the code, is there once.
template <class Source, class Target, u32 Lanes> struct CastLanes {
    using SourceBits = typename Source::Bits;
    using TargetBits = typename Target::Bits;
    using Held = typename WordOf<Lanes * sizeof(SourceBits)>::Word;
    using Result = typename WordOf<Lanes * sizeof(TargetBits)>::Word;
    u64 source, destination;

    __device__ Held take(u64 item) const {
        const u64 address = source + item * sizeof(Held);
        if (source % sizeof(Held) == 0) return wl_load<Held>(address);
        if (source % 4 == 0) return load_in_parts<Held, u32>(address);
        if (source % 2 == 0) return load_in_parts<Held, u16>(address);
        return load_in_parts<Held, u8>(address);
    }
    __device__ void put(u64 item, Held held) const {
        Result result = {};
        for (u32 lane = 0; lane < Lanes; lane++) {
            set_part(result, lane, cast_one<Source, Target>(part_of<SourceBits>(held, lane)));
        }
        wl_store<Result>(destination + item * sizeof(Result), result);
    }
};

// The elements before and after those that fill whole words of the destination.
template <class Source, class Target> struct CastEdges : CastLanes<Source, Target, 1> {
    using Lanes = CastLanes<Source, Target, 1>;
    u64 head, between;

    __device__ u64 element(u64 item) const { return item < head ? item : item + between; }
    __device__ typename Lanes::Held take(u64 item) const { return Lanes::take(element(item)); }
    __device__ void put(u64 item, typename Lanes::Held held) const { Lanes::put(element(item), held); }
};

template <class Source, class Target> __device__ void cast(const Segment& segment) {
    constexpr u64 source_size = sizeof(typename Source::Bits), target_size = sizeof(typename Target::Bits);
    // As many as the wider side fits in one access: then neighbouring threads leave no gaps on either side.
    constexpr u32 lanes = sizeof(Quad) / (source_size > target_size ? source_size : target_size);
    using Packs = CastLanes<Source, Target, lanes>;

    const u64 to_boundary = ((0 - segment.destination) & (lanes * target_size - 1)) / target_size;
    const u64 head = to_boundary < segment.count ? to_boundary : segment.count;
    const u64 packs = (segment.count - head) / lanes;
    share_out<1>(Packs{segment.source + head * source_size, segment.destination + head * target_size}, packs);
    const CastEdges<Source, Target> edges{{segment.source, segment.destination}, head, packs * lanes};
    share_out<1>(edges, segment.count - packs * lanes);
}

}  // namespace

// ---- Kernels ----

// Without launch bounds: with them, ptxas spills a register here and there to keep more blocks resident.
#define WL_KERNEL(name) extern "C" __global__ void name(u64 table)

#define WL_CASTS(each)                                            \
    each(f32, f16) each(f32, bf16)                                \
    each(f16, f32) each(f16, bf16)                                \
    each(bf16, f32) each(bf16, f16)                               \
    each(f8e4m3, f32) each(f8e4m3, f16) each(f8e4m3, bf16)        \
    each(f8e5m2, f32) each(f8e5m2, f16) each(f8e5m2, bf16)

WL_KERNEL(hoistway_copy) { copy(my_segment(table)); }

#define WL_CAST(from, to) \
    WL_KERNEL(hoistway_cast_##from##_##to) { cast<from, to>(my_segment(table)); }
WL_CASTS(WL_CAST)

#ifdef HOISTWAY_HOST_KERNELS

extern "C" void (*hoistway_kernel(const char* name))(unsigned long long table) {
    const auto is = [name](const char* other) {
        u64 i = 0;
        while (name[i] != 0 && name[i] == other[i]) i++;
        return name[i] == other[i];
    };
    if (is("hoistway_copy")) return hoistway_copy;
#define WL_NAMED(from, to) \
    if (is("hoistway_cast_" #from "_" #to)) return hoistway_cast_##from##_##to;
    WL_CASTS(WL_NAMED)
    return nullptr;
}

#endif
