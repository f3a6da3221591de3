// windlass for C++17: handles that free themselves, and exceptions. Everything is in the namespace `windlass`.
//
//     windlass::Catalog catalog({"model.gguf"});
//     windlass::Reader reader;
//     std::vector<windlass::Read> reads;
//     for (const windlass_tensor& tensor : catalog)
//         reads.push_back(catalog.to_host(tensor, destination_of(tensor)));
//     windlass::Batch batch = reader.submit(reads);
//     batch.wait();
#ifndef WINDLASS_HPP
#define WINDLASS_HPP

#include "windlass.h"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace windlass {

// What a call has failed with: a sentence, and its status.
class Error : public std::runtime_error {
  public:
    Error(windlass_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
    windlass_status status() const noexcept { return status_; }

  private:
    windlass_status status_;
};

// Throws what this thread's last call has failed with, if `status` says that it has.
inline void check(windlass_status status) {
    if (status != WINDLASS_OK) {
        throw Error(status, windlass_last_error());
    }
}

namespace detail {

struct Deleter {
    void operator()(windlass_catalog* catalog) const noexcept { windlass_catalog_free(catalog); }
    void operator()(windlass_reader* reader) const noexcept { windlass_reader_free(reader); }
    void operator()(windlass_batch* batch) const noexcept { windlass_batch_free(batch); }
    void operator()(char* string) const noexcept { windlass_string_free(string); }
};

template <typename Function> std::string text(Function&& function) {
    char* string = nullptr;
    check(function(&string));
    return std::unique_ptr<char, Deleter>(string).get();
}

} // namespace detail

// Bytes of a file, and where they go. What it points to must live until it was submitted.
struct Read : windlass_read {
    Read() : windlass_read() {
        size = sizeof(windlass_read);
        fd = -1;
    }
};
static_assert(sizeof(Read) == sizeof(windlass_read), "arrays of reads are arrays of windlass_read");

// What a checkpoint holds.
class Catalog {
  public:
    struct Options {
        std::uint64_t offset = 0;
        bool lenient = false;
    };

    explicit Catalog(const std::vector<std::string>& paths, Options options) {
        std::vector<const char*> strings;
        for (const std::string& path : paths) {
            strings.push_back(path.c_str());
        }
        windlass_catalog_options chosen = {};
        chosen.size = sizeof chosen;
        chosen.offset = options.offset;
        chosen.lenient = options.lenient;
        windlass_catalog* catalog = nullptr;
        check(windlass_catalog_open(strings.data(), strings.size(), &chosen, &catalog));
        handle_.reset(catalog);
    }
    explicit Catalog(const std::vector<std::string>& paths) : Catalog(paths, Options()) {}

    std::uint64_t size() const noexcept { return windlass_catalog_tensor_count(handle_.get()); }

    // The tensor at a position; what it points to lives as long as the catalog.
    windlass_tensor operator[](std::uint64_t index) const {
        windlass_tensor tensor = {};
        tensor.size = sizeof tensor;
        check(windlass_catalog_tensor(handle_.get(), index, &tensor));
        return tensor;
    }

    // The tensor of a name, if there is one.
    std::optional<windlass_tensor> find(const std::string& name) const {
        windlass_tensor tensor = {};
        tensor.size = sizeof tensor;
        windlass_status status = windlass_catalog_find(handle_.get(), name.c_str(), &tensor);
        if (status == WINDLASS_NOT_FOUND) {
            return std::nullopt;
        }
        check(status);
        return tensor;
    }

    class Iterator {
      public:
        using iterator_category = std::input_iterator_tag;
        using value_type = windlass_tensor;
        using difference_type = std::ptrdiff_t;
        using pointer = const windlass_tensor*;
        using reference = windlass_tensor;

        Iterator(const Catalog* catalog, std::uint64_t index) : catalog_(catalog), index_(index) {}
        windlass_tensor operator*() const { return (*catalog_)[index_]; }
        Iterator& operator++() {
            ++index_;
            return *this;
        }
        Iterator operator++(int) {
            Iterator before = *this;
            ++index_;
            return before;
        }
        bool operator==(const Iterator& other) const { return index_ == other.index_; }
        bool operator!=(const Iterator& other) const { return index_ != other.index_; }

      private:
        const Catalog* catalog_;
        std::uint64_t index_;
    };

    // All bytes of a tensor of this catalog to memory of the host: of the very file whose header was read, or an error.
    Read to_host(const windlass_tensor& tensor, void* destination) const {
        Read read;
        read.catalog = handle_.get();
        read.file = tensor.file;
        read.offset = tensor.offset;
        read.length = tensor.bytes;
        read.destination = destination;
        read.name = tensor.name;
        read.target = WINDLASS_TARGET_HOST;
        return read;
    }

    // The same to memory of a CUDA device.
    Read to_cuda(const windlass_tensor& tensor, int device, void* destination) const {
        Read read = to_host(tensor, destination);
        read.target = WINDLASS_TARGET_CUDA;
        read.device = device;
        return read;
    }

    Iterator begin() const { return Iterator(this, 0); }
    Iterator end() const { return Iterator(this, size()); }

  private:
    std::unique_ptr<windlass_catalog, detail::Deleter> handle_;
};

// Reads on their way. When it goes, what has not begun is cancelled and what is under way is waited for.
class Batch {
  public:
    explicit Batch(windlass_batch* batch) : handle_(batch) {}

    // Waits for all reads. Throws what the first that failed has failed with.
    void wait() const { check(windlass_batch_wait(handle_.get(), UINT64_MAX, nullptr, nullptr)); }

    // Waits for all reads, `timeout_ms` milliseconds at most: whether all have ended.
    bool wait_for(std::uint64_t timeout_ms) const {
        windlass_status status = windlass_batch_wait(handle_.get(), timeout_ms, nullptr, nullptr);
        if (status == WINDLASS_PENDING) {
            return false;
        }
        check(status);
        return true;
    }

    // Waits for one read. Throws what it has failed with.
    void wait_read(std::uint64_t index) const {
        check(windlass_batch_wait_read(handle_.get(), index, UINT64_MAX));
    }

    // The next read to end, each once; nothing if none ends within `timeout_ms` milliseconds, or all were told.
    std::optional<std::uint64_t> next_ended(std::uint64_t timeout_ms) const {
        std::uint64_t index = 0;
        windlass_status status = windlass_batch_next_ended(handle_.get(), timeout_ms, &index);
        if (status == WINDLASS_PENDING || status == WINDLASS_NOT_FOUND) {
            return std::nullopt;
        }
        check(status);
        return index;
    }

    windlass_status status(std::uint64_t index) const noexcept {
        return windlass_batch_status(handle_.get(), index);
    }

    // Why a read failed; empty if it did not.
    std::string error(std::uint64_t index) const {
        return detail::text([&](char** string) { return windlass_batch_error(handle_.get(), index, string); });
    }

    // What it has done, as JSON.
    std::string report() const {
        return detail::text([&](char** string) { return windlass_batch_report(handle_.get(), string); });
    }

    void promote() const { check(windlass_batch_promote(handle_.get())); }
    void cancel() const { check(windlass_batch_cancel(handle_.get())); }
    windlass_batch* get() const noexcept { return handle_.get(); }

  private:
    std::unique_ptr<windlass_batch, detail::Deleter> handle_;
};

// Threads and staging memory for reads, kept between batches.
class Reader {
  public:
    struct Options {
        std::string route = "auto";
        std::uint64_t memory_budget_bytes = 0;
        std::uint64_t in_flight = 0;
        std::uint64_t flags = 0;
    };

    explicit Reader(const Options& options) {
        windlass_reader_options chosen = {};
        chosen.size = sizeof chosen;
        chosen.route = options.route.c_str();
        chosen.memory_budget_bytes = options.memory_budget_bytes;
        chosen.in_flight = options.in_flight;
        chosen.flags = options.flags;
        windlass_reader* reader = nullptr;
        check(windlass_reader_create(&chosen, &reader));
        handle_.reset(reader);
    }
    Reader() : Reader(Options()) {}

    // Starts to read; see windlass_batch_submit.
    Batch submit(const std::vector<Read>& reads, int priority = WINDLASS_DEMAND) const {
        windlass_batch* batch = nullptr;
        check(windlass_batch_submit(handle_.get(), reads.data(), reads.size(), priority, &batch));
        return Batch(batch);
    }

  private:
    std::unique_ptr<windlass_reader, detail::Deleter> handle_;
};

} // namespace windlass

#endif
