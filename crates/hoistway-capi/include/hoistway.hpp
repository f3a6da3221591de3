// hoistway for C++17: handles that free themselves, and exceptions. Everything is in the namespace `hoistway`.
//
//     hoistway::Catalog catalog({"model.gguf"});
//     hoistway::Reader reader;
//     std::vector<hoistway::Read> reads;
//     for (const hoistway_tensor& tensor : catalog)
//         reads.push_back(catalog.to_host(tensor, destination_of(tensor)));
//     hoistway::Batch batch = reader.submit(reads);
//     batch.wait();
//
//     hoistway::experts::Store experts(catalog, hoistway::experts::Options(8ull << 30));
//     hoistway::experts::Lease lease = experts.ensure(layer, {3, 17});
//     for (const hoistway_part& part : lease.parts(0))
//         compute_with(part.address, part.bytes);
//
//     hoistway::kv::Store store(hoistway::kv::Options("/mnt/nvme/kv", 100ull << 30));
//     hoistway::kv::Namespace blocks = store.open(hoistway::kv::Description("llama@1"));
//     hoistway::kv::Items items;
//     items.add("tokens 0..16", memory, length);
//     blocks.store(items).wait();
#ifndef HOISTWAY_HPP
#define HOISTWAY_HPP

#include "hoistway.h"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hoistway {

// The failure of a call: a sentence, and its status.
class Error : public std::runtime_error {
  public:
    Error(hoistway_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
    hoistway_status status() const noexcept { return status_; }

  private:
    hoistway_status status_;
};

// Throws the failure of this thread's last call if `status` is one.
inline void check(hoistway_status status) {
    if (status != HOISTWAY_OK) {
        throw Error(status, hoistway_last_error());
    }
}

namespace detail {

struct Deleter {
    void operator()(hoistway_catalog* catalog) const noexcept { hoistway_catalog_free(catalog); }
    void operator()(hoistway_reader* reader) const noexcept { hoistway_reader_free(reader); }
    void operator()(hoistway_batch* batch) const noexcept { hoistway_batch_free(batch); }
    void operator()(hoistway_experts* store) const noexcept { hoistway_experts_free(store); }
    void operator()(hoistway_lease* lease) const noexcept { hoistway_lease_free(lease); }
    void operator()(hoistway_rows* rows) const noexcept { hoistway_rows_free(rows); }
    void operator()(hoistway_layers* layers) const noexcept { hoistway_layers_free(layers); }
    void operator()(hoistway_layer* layer) const noexcept { hoistway_layer_free(layer); }
    void operator()(hoistway_kv* store) const noexcept { hoistway_kv_free(store); }
    void operator()(hoistway_kv_namespace* blocks) const noexcept { hoistway_kv_namespace_free(blocks); }
    void operator()(hoistway_kv_ticket* ticket) const noexcept { hoistway_kv_ticket_free(ticket); }
    void operator()(hoistway_kv_region* region) const noexcept { hoistway_kv_region_free(region); }
    void operator()(char* string) const noexcept { hoistway_string_free(string); }
};

template <typename Function> std::string text(Function&& function) {
    char* string = nullptr;
    check(function(&string));
    return std::unique_ptr<char, Deleter>(string).get();
}

} // namespace detail

// A range of a file, and where its bytes go. What it points to must live until it is submitted.
struct Read : hoistway_read {
    Read() : hoistway_read() {
        size = sizeof(hoistway_read);
        fd = -1;
    }
};
static_assert(sizeof(Read) == sizeof(hoistway_read), "arrays of reads are arrays of hoistway_read");

// An open checkpoint: its files and tensors.
class Catalog {
  public:
    struct Options {
        std::uint64_t offset = 0;
        bool lenient = false;
        // Endpoint and credentials of object stores, for paths that are URLs.
        std::vector<std::pair<std::string, std::string>> store;
    };

    explicit Catalog(const std::vector<std::string>& paths, Options options) {
        std::vector<const char*> strings;
        for (const std::string& path : paths) {
            strings.push_back(path.c_str());
        }
        hoistway_catalog_options chosen = {};
        chosen.size = sizeof chosen;
        chosen.offset = options.offset;
        chosen.lenient = options.lenient;
        std::vector<hoistway_store_option> store;
        for (const auto& [name, value] : options.store) {
            store.push_back({name.c_str(), value.c_str()});
        }
        chosen.store = store.data();
        chosen.store_count = store.size();
        hoistway_catalog* catalog = nullptr;
        check(hoistway_catalog_open(strings.data(), strings.size(), &chosen, &catalog));
        handle_.reset(catalog);
    }
    explicit Catalog(const std::vector<std::string>& paths) : Catalog(paths, Options()) {}

    std::uint64_t size() const noexcept { return hoistway_catalog_tensor_count(handle_.get()); }

    // Returns the tensor at a position. Its pointers are valid as long as the catalog.
    hoistway_tensor operator[](std::uint64_t index) const {
        hoistway_tensor tensor = {};
        tensor.size = sizeof tensor;
        check(hoistway_catalog_tensor(handle_.get(), index, &tensor));
        return tensor;
    }

    // Returns the tensor of this name, if there is one.
    std::optional<hoistway_tensor> find(const std::string& name) const {
        hoistway_tensor tensor = {};
        tensor.size = sizeof tensor;
        hoistway_status status = hoistway_catalog_find(handle_.get(), name.c_str(), &tensor);
        if (status == HOISTWAY_NOT_FOUND) {
            return std::nullopt;
        }
        check(status);
        return tensor;
    }

    class Iterator {
      public:
        using iterator_category = std::input_iterator_tag;
        using value_type = hoistway_tensor;
        using difference_type = std::ptrdiff_t;
        using pointer = const hoistway_tensor*;
        using reference = hoistway_tensor;

        Iterator(const Catalog* catalog, std::uint64_t index) : catalog_(catalog), index_(index) {}
        hoistway_tensor operator*() const { return (*catalog_)[index_]; }
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

    // A read of a whole tensor into host memory. It gets the file whose header was read, or fails.
    Read to_host(const hoistway_tensor& tensor, void* destination) const {
        Read read;
        read.catalog = handle_.get();
        read.file = tensor.file;
        read.offset = tensor.offset;
        read.length = tensor.bytes;
        read.destination = destination;
        read.name = tensor.name;
        read.target = HOISTWAY_TARGET_HOST;
        return read;
    }

    // The same into memory of a CUDA device.
    Read to_cuda(const hoistway_tensor& tensor, int device, void* destination) const {
        Read read = to_host(tensor, destination);
        read.target = HOISTWAY_TARGET_CUDA;
        read.device = device;
        return read;
    }

    // The same into memory of a ROCm device.
    Read to_rocm(const hoistway_tensor& tensor, int device, void* destination) const {
        Read read = to_host(tensor, destination);
        read.target = HOISTWAY_TARGET_ROCM;
        read.device = device;
        return read;
    }

    Iterator begin() const { return Iterator(this, 0); }
    Iterator end() const { return Iterator(this, size()); }
    const hoistway_catalog* get() const noexcept { return handle_.get(); }

  private:
    std::unique_ptr<hoistway_catalog, detail::Deleter> handle_;
};

// A group of reads. Its destructor cancels reads that have not begun, and waits for those in flight.
class Batch {
  public:
    explicit Batch(hoistway_batch* batch) : handle_(batch) {}

    // Waits for all reads. Throws the failure of the first that failed.
    void wait() const { check(hoistway_batch_wait(handle_.get(), UINT64_MAX, nullptr, nullptr)); }

    // Waits for all reads, at most `timeout_ms` milliseconds. Returns whether all have ended.
    bool wait_for(std::uint64_t timeout_ms) const {
        hoistway_status status = hoistway_batch_wait(handle_.get(), timeout_ms, nullptr, nullptr);
        if (status == HOISTWAY_PENDING) {
            return false;
        }
        check(status);
        return true;
    }

    // Waits for one read. Throws its failure.
    void wait_read(std::uint64_t index) const {
        check(hoistway_batch_wait_read(handle_.get(), index, UINT64_MAX));
    }

    // Returns the next read that ended, each once; nothing if none ends within `timeout_ms` milliseconds, or all were
    // returned.
    std::optional<std::uint64_t> next_ended(std::uint64_t timeout_ms) const {
        std::uint64_t index = 0;
        hoistway_status status = hoistway_batch_next_ended(handle_.get(), timeout_ms, &index);
        if (status == HOISTWAY_PENDING || status == HOISTWAY_NOT_FOUND) {
            return std::nullopt;
        }
        check(status);
        return index;
    }

    hoistway_status status(std::uint64_t index) const noexcept {
        return hoistway_batch_status(handle_.get(), index);
    }

    // Returns why a read failed; an empty string if it did not.
    std::string error(std::uint64_t index) const {
        return detail::text([&](char** string) { return hoistway_batch_error(handle_.get(), index, string); });
    }

    // Returns a report of what it has done, as JSON.
    std::string report() const {
        return detail::text([&](char** string) { return hoistway_batch_report(handle_.get(), string); });
    }

    void promote() const { check(hoistway_batch_promote(handle_.get())); }
    void cancel() const { check(hoistway_batch_cancel(handle_.get())); }
    hoistway_batch* get() const noexcept { return handle_.get(); }

  private:
    std::unique_ptr<hoistway_batch, detail::Deleter> handle_;
};

// Threads and staging memory for reads, reused between batches.
class Reader {
  public:
    struct Options {
        std::string route = "auto";
        std::uint64_t memory_budget_bytes = 0;
        std::uint64_t in_flight = 0;
        std::uint64_t flags = 0;
    };

    explicit Reader(const Options& options) {
        hoistway_reader_options chosen = {};
        chosen.size = sizeof chosen;
        chosen.route = options.route.c_str();
        chosen.memory_budget_bytes = options.memory_budget_bytes;
        chosen.in_flight = options.in_flight;
        chosen.flags = options.flags;
        hoistway_reader* reader = nullptr;
        check(hoistway_reader_create(&chosen, &reader));
        handle_.reset(reader);
    }
    Reader() : Reader(Options()) {}

    // Starts reads; see hoistway_batch_submit.
    Batch submit(const std::vector<Read>& reads, int priority = HOISTWAY_DEMAND) const {
        hoistway_batch* batch = nullptr;
        check(hoistway_batch_submit(handle_.get(), reads.data(), reads.size(), priority, &batch));
        return Batch(batch);
    }
    const hoistway_reader* get() const noexcept { return handle_.get(); }

  private:
    std::unique_ptr<hoistway_reader, detail::Deleter> handle_;
};

// Models larger than memory.
namespace experts {

// How to open a store. Strings must live until it is open.
struct Options : hoistway_experts_options {
    explicit Options(std::uint64_t budget = 0) : hoistway_experts_options() {
        size = sizeof(hoistway_experts_options);
        budget_bytes = budget;
    }
};

// A lease: its experts or dense tensors stay at their addresses until it is destroyed.
class Lease {
  public:
    Lease() = default;
    explicit Lease(hoistway_lease* lease) : handle_(lease) {}

    std::uint64_t size() const noexcept { return hoistway_lease_count(handle_.get()); }

    // Describes a part, with its address, of the expert at a position of the request.
    hoistway_part part(std::uint64_t position, std::uint64_t index) const {
        hoistway_part part = {};
        part.size = sizeof part;
        check(hoistway_lease_part(handle_.get(), position, index, &part));
        return part;
    }

    // All parts of the expert at a position of the request.
    std::vector<hoistway_part> parts(std::uint64_t position) const {
        std::vector<hoistway_part> parts(hoistway_lease_part_count(handle_.get(), position));
        for (std::size_t index = 0; index < parts.size(); ++index) {
            parts[index] = part(position, index);
        }
        return parts;
    }

    // Frees the lease.
    void reset() noexcept { handle_.reset(); }

  private:
    std::unique_ptr<hoistway_lease, detail::Deleter> handle_;
};

// A store of experts and dense tensors.
class Store {
  public:
    explicit Store(const Catalog& catalog, const Options& options = Options()) {
        hoistway_experts* store = nullptr;
        check(hoistway_experts_open(catalog.get(), &options, &store));
        handle_.reset(store);
    }

    hoistway_experts_model describe() const {
        hoistway_experts_model model = {};
        model.size = sizeof model;
        check(hoistway_experts_describe(handle_.get(), &model));
        return model;
    }

    // The layers that have experts.
    std::vector<hoistway_experts_layer_info> layers() const {
        std::vector<hoistway_experts_layer_info> layers(describe().layers);
        for (std::size_t index = 0; index < layers.size(); ++index) {
            layers[index].size = sizeof layers[index];
            check(hoistway_experts_layer(handle_.get(), index, &layers[index]));
        }
        return layers;
    }

    // Describes the parts of an expert, without addresses.
    std::vector<hoistway_part> parts(std::uint32_t layer, std::uint32_t expert) const {
        std::vector<hoistway_part> parts;
        hoistway_part part = {};
        part.size = sizeof part;
        for (std::uint64_t index = 0;; ++index) {
            hoistway_status status = hoistway_experts_part(handle_.get(), layer, expert, index, &part);
            if (status == HOISTWAY_NOT_FOUND && index > 0) {
                return parts;
            }
            check(status);
            parts.push_back(part);
        }
    }

    // See hoistway_experts_ensure.
    Lease ensure(std::uint32_t layer, const std::vector<std::uint32_t>& experts) const {
        hoistway_lease* lease = nullptr;
        check(hoistway_experts_ensure(handle_.get(), layer, experts.data(), experts.size(), &lease));
        return Lease(lease);
    }

    Lease ensure_tensors(const std::vector<std::string>& names) const {
        hoistway_lease* lease = nullptr;
        const std::vector<const char*> strings = strings_of(names);
        check(hoistway_experts_ensure_tensors(handle_.get(), strings.data(), strings.size(), &lease));
        return Lease(lease);
    }

    // Tells the policy what a router chose. Give a weight for each expert, or none.
    void observe(std::uint32_t layer, const std::vector<std::uint32_t>& experts,
                 const std::vector<float>& weights = {}) const {
        const float* given = weights.size() == experts.size() ? weights.data() : nullptr;
        if (!given && !weights.empty()) {
            throw Error(HOISTWAY_INVALID_ARGUMENT, "there are not as many weights as experts");
        }
        check(hoistway_experts_observe(handle_.get(), layer, experts.data(), given, experts.size()));
    }

    void prefetch(std::uint32_t layer, const std::vector<std::uint32_t>& experts,
                  std::uint64_t deadline_ms = UINT64_MAX) const {
        check(hoistway_experts_prefetch(handle_.get(), layer, experts.data(), experts.size(), deadline_ms));
    }
    void cancel_before(std::uint32_t layer) const { check(hoistway_experts_cancel_before(handle_.get(), layer)); }
    void set_budget(std::uint64_t bytes) const { check(hoistway_experts_set_budget(handle_.get(), bytes)); }

    bool is_resident(std::uint32_t layer, std::uint32_t expert) const {
        bool resident = false;
        check(hoistway_experts_is_resident(handle_.get(), layer, expert, &resident));
        return resident;
    }
    bool is_resident(const std::string& name) const {
        bool resident = false;
        check(hoistway_experts_is_tensor_resident(handle_.get(), name.c_str(), &resident));
        return resident;
    }

    // Evicts what is not leased. Returns how many.
    std::uint64_t evict(std::uint32_t layer, const std::vector<std::uint32_t>& experts) const {
        std::uint64_t evicted = 0;
        check(hoistway_experts_evict(handle_.get(), layer, experts.data(), experts.size(), &evicted));
        return evicted;
    }
    std::uint64_t evict(const std::vector<std::string>& names) const {
        std::uint64_t evicted = 0;
        const std::vector<const char*> strings = strings_of(names);
        check(hoistway_experts_evict_tensors(handle_.get(), strings.data(), strings.size(), &evicted));
        return evicted;
    }

    // Returns the address of a tensor with the backing "host_sparse", or of a stacked tensor with "device_sparse"; nullptr if it has
    // none.
    void* tensor_address(const std::string& name) const {
        void* address = nullptr;
        hoistway_status status = hoistway_experts_tensor_address(handle_.get(), name.c_str(), &address);
        if (status != HOISTWAY_NOT_FOUND) {
            check(status);
        }
        return address;
    }

    std::string stats() const {
        return detail::text([&](char** json) { return hoistway_experts_stats(handle_.get(), json); });
    }
    std::string events() const {
        return detail::text([&](char** json) { return hoistway_experts_events(handle_.get(), json); });
    }

  private:
    static std::vector<const char*> strings_of(const std::vector<std::string>& names) {
        std::vector<const char*> strings;
        for (const std::string& name : names) {
            strings.push_back(name.c_str());
        }
        return strings;
    }

    std::unique_ptr<hoistway_experts, detail::Deleter> handle_;
};

// A table in a file.
class Rows {
  public:
    Rows(const Reader& reader, const Catalog& catalog, const std::string& tensor) {
        hoistway_rows* rows = nullptr;
        check(hoistway_rows_open(reader.get(), catalog.get(), tensor.c_str(), &rows));
        handle_.reset(rows);
    }

    std::uint64_t size() const noexcept { return hoistway_rows_count(handle_.get()); }
    std::uint64_t row_bytes() const noexcept { return hoistway_rows_row_bytes(handle_.get()); }

    // Reads rows, one after the other.
    std::vector<unsigned char> gather(const std::vector<std::uint64_t>& rows) const {
        std::vector<unsigned char> bytes(rows.size() * row_bytes());
        check(hoistway_rows_gather(handle_.get(), rows.data(), rows.size(), bytes.data(), bytes.size()));
        return bytes;
    }

  private:
    std::unique_ptr<hoistway_rows, detail::Deleter> handle_;
};

// How to stream layers. What it points to must live until the stream is open.
struct LayersOptions : hoistway_layers_options {
    explicit LayersOptions(std::uint64_t budget = 0) : hoistway_layers_options() {
        size = sizeof(hoistway_layers_options);
        budget_bytes = budget;
    }
};

// A layer in memory, until it is destroyed. Work that is queued on a device may use a layer in device memory still then. Work that reads
// one in host memory must have ended.
class Layer {
  public:
    explicit Layer(hoistway_layer* layer) : handle_(layer) {}

    std::string name() const { return hoistway_layer_name(handle_.get()); }

    // Their pointers are valid as long as the layer.
    std::vector<hoistway_layer_part> tensors() const {
        std::vector<hoistway_layer_part> tensors(hoistway_layer_tensor_count(handle_.get()));
        for (std::size_t index = 0; index < tensors.size(); ++index) {
            tensors[index].size = sizeof tensors[index];
            check(hoistway_layer_tensor(handle_.get(), index, &tensors[index]));
        }
        return tensors;
    }

    // Work that is queued by now on `stream` uses the layer, which lies in device memory; name each stream that does, and no other work
    // may. nullptr is the legacy default stream. HOISTWAY_INVALID_ARGUMENT for a layer in host memory.
    void used_behind(void* stream) const { check(hoistway_layer_used_behind(handle_.get(), stream)); }

  private:
    std::unique_ptr<hoistway_layer, detail::Deleter> handle_;
};

// A stream of the layers of a model, which begins again after the last layer.
class Layers {
  public:
    Layers(const Reader& reader, const Catalog& catalog, const LayersOptions& options = LayersOptions()) {
        hoistway_layers* layers = nullptr;
        check(hoistway_layers_open(reader.get(), catalog.get(), &options, &layers));
        handle_.reset(layers);
    }

    // Waits for the next layer. After the last comes the first.
    Layer next() const {
        hoistway_layer* layer = nullptr;
        check(hoistway_layers_next(handle_.get(), &layer));
        return Layer(layer);
    }

    // Ends waits for room, also of other threads: next() throws where it would wait for layers that the caller holds.
    void stop() const {
        check(hoistway_layers_stop(handle_.get()));
    }

    std::string stats() const {
        return detail::text([&](char** json) { return hoistway_layers_stats(handle_.get(), json); });
    }

  private:
    std::unique_ptr<hoistway_layers, detail::Deleter> handle_;
};

} // namespace experts

// The KV store; Linux only.
namespace kv {

// How to open a store. Strings must live until it is open.
struct Options : hoistway_kv_options {
    explicit Options(const char* directory, std::uint64_t capacity = 0) : hoistway_kv_options() {
        size = sizeof(hoistway_kv_options);
        root = directory;
        capacity_bytes = capacity;
    }
};

// A far tier: a second store behind the near one, to which `Options::far_tier` points. Strings must live until the store
// is open.
struct FarOptions : hoistway_kv_far_options {
    explicit FarOptions(const char* directory, std::uint64_t capacity = 0) : hoistway_kv_far_options() {
        size = sizeof(hoistway_kv_far_options);
        root = directory;
        capacity_bytes = capacity;
    }
};

// What identifies a namespace. Strings must live until the namespace is open.
struct Description : hoistway_kv_description {
    explicit Description(const char* name) : hoistway_kv_description() {
        size = sizeof(hoistway_kv_description);
        model = name;
    }
};

// How to load or store blocks.
struct Request : hoistway_kv_request {
    Request() : hoistway_kv_request() { size = sizeof(hoistway_kv_request); }
};

// Host memory.
inline hoistway_kv_piece host(void* address, std::uint64_t length) {
    return {address, length, HOISTWAY_TARGET_HOST, 0};
}

// Memory of a CUDA device.
inline hoistway_kv_piece cuda(int device, void* address, std::uint64_t length) {
    return {address, length, HOISTWAY_TARGET_CUDA, device};
}

// Memory of a ROCm device.
inline hoistway_kv_piece rocm(int device, void* address, std::uint64_t length) {
    return {address, length, HOISTWAY_TARGET_ROCM, device};
}

inline hoistway_kv_key key(std::string_view name) { return {name.data(), name.size()}; }

// Shards of blocks, and their memory. Keys must live until the items are submitted.
class Items {
  public:
    void add(std::string_view name, const std::vector<hoistway_kv_piece>& pieces, std::uint32_t shard = 0) {
        pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
        items_.push_back({sizeof(hoistway_kv_item), key(name), nullptr, pieces.size(), shard, 0});
    }
    void add(std::string_view name, void* address, std::uint64_t length, std::uint32_t shard = 0) {
        add(name, std::vector<hoistway_kv_piece>{host(address, length)}, shard);
    }
    std::size_t size() const noexcept { return items_.size(); }

    // The items as the C functions take them; valid until an item is added.
    const hoistway_kv_item* data() noexcept {
        const hoistway_kv_piece* next = pieces_.data();
        for (hoistway_kv_item& item : items_) {
            item.pieces = next;
            next += item.piece_count;
        }
        return items_.data();
    }

  private:
    std::vector<hoistway_kv_item> items_;
    std::vector<hoistway_kv_piece> pieces_;
};

// A request. Its destructor cancels what has not ended, and waits until the memory is released.
class Ticket {
  public:
    Ticket(hoistway_kv_ticket* ticket, std::size_t items) : handle_(ticket), items_(items) {}

    // Waits for the end. Throws the failure of the first item that failed.
    void wait() const { check(hoistway_kv_ticket_wait(handle_.get(), UINT64_MAX)); }

    // Waits for the end, at most `timeout_ms` milliseconds. Returns whether it has ended; items may have failed.
    bool wait_for(std::uint64_t timeout_ms) const {
        return hoistway_kv_ticket_wait(handle_.get(), timeout_ms) != HOISTWAY_PENDING;
    }

    // Returns HOISTWAY_PENDING, HOISTWAY_OK, or the status of the first item that failed. Does not wait.
    hoistway_status poll() const noexcept { return hoistway_kv_ticket_poll(handle_.get()); }

    // Returns how each item ended.
    std::vector<hoistway_kv_outcome> outcomes() const {
        std::vector<hoistway_kv_outcome> outcomes(items_);
        check(hoistway_kv_ticket_outcomes(handle_.get(), outcomes.data(), outcomes.size()));
        return outcomes;
    }

    // Cancels the request. Its memory is the store's until it is released.
    void cancel() const { check(hoistway_kv_ticket_cancel(handle_.get())); }

    // Returns whether the memory is the caller's again.
    bool is_released() const noexcept { return hoistway_kv_ticket_is_released(handle_.get()); }

    // Waits for that, at most `timeout_ms` milliseconds. Returns is_released(). Throws if it cannot be known.
    bool wait_released(std::uint64_t timeout_ms = UINT64_MAX) const {
        hoistway_status status = hoistway_kv_ticket_wait_released(handle_.get(), timeout_ms);
        if (status == HOISTWAY_PENDING) {
            return false;
        }
        check(status);
        return true;
    }

    // Returns a report of the request, as JSON.
    std::string report() const {
        return detail::text([&](char** json) { return hoistway_kv_ticket_report(handle_.get(), json); });
    }

    std::uint64_t id() const noexcept { return hoistway_kv_ticket_id(handle_.get()); }

  private:
    std::unique_ptr<hoistway_kv_ticket, detail::Deleter> handle_;
    std::size_t items_;
};

// A namespace. It keeps its store open.
class Namespace {
  public:
    explicit Namespace(hoistway_kv_namespace* blocks) : handle_(blocks) {}

    // Returns for each key whether the store has the block: 1 or 0.
    std::vector<std::uint8_t> lookup(const std::vector<hoistway_kv_key>& keys) const {
        std::vector<std::uint8_t> found(keys.size());
        static_assert(sizeof(bool) == 1, "answers are bytes");
        if (!keys.empty()) {
            bool* answers = reinterpret_cast<bool*>(found.data());
            check(hoistway_kv_lookup(handle_.get(), keys.data(), keys.size(), answers));
        }
        return found;
    }

    // Returns how many blocks the store has before the first missing one.
    std::uint64_t lookup_prefix(const std::vector<hoistway_kv_key>& keys) const {
        std::uint64_t length = 0;
        check(hoistway_kv_lookup_prefix(handle_.get(), keys.data(), keys.size(), &length));
        return length;
    }

    // Returns the position of the last block that the store has, if it has one.
    std::optional<std::uint64_t> lookup_reverse(const std::vector<hoistway_kv_key>& keys) const {
        std::uint64_t index = 0;
        hoistway_status status = hoistway_kv_lookup_reverse(handle_.get(), keys.data(), keys.size(), &index);
        if (status == HOISTWAY_NOT_FOUND) {
            return std::nullopt;
        }
        check(status);
        return index;
    }

    // Removes blocks; with the layout "segments" those that this process stored. Returns how many.
    std::uint64_t remove(const std::vector<hoistway_kv_key>& keys) const {
        std::uint64_t removed = 0;
        check(hoistway_kv_delete(handle_.get(), keys.data(), keys.size(), &removed));
        return removed;
    }

    // Starts to load; see hoistway_kv_load. The memory is the store's until the ticket is released.
    Ticket load(Items& items, int priority = HOISTWAY_DEMAND, const Request& request = Request()) const {
        return submit(hoistway_kv_load, items, priority, request);
    }

    // Starts to store; see hoistway_kv_store.
    Ticket store(Items& items, int priority = HOISTWAY_BACKGROUND, const Request& request = Request()) const {
        return submit(hoistway_kv_store, items, priority, request);
    }

  private:
    template <typename Start> Ticket submit(Start start, Items& items, int priority, const Request& request) const {
        hoistway_kv_ticket* ticket = nullptr;
        check(start(handle_.get(), items.data(), items.size(), priority, &request, &ticket));
        return Ticket(ticket, items.size());
    }

    std::unique_ptr<hoistway_kv_namespace, detail::Deleter> handle_;
};

// Memory that is registered with a store, until this is destroyed.
class Region {
  public:
    explicit Region(hoistway_kv_region* region) : handle_(region) {}
    bool is_direct() const noexcept { return hoistway_kv_region_is_direct(handle_.get()); }

  private:
    std::unique_ptr<hoistway_kv_region, detail::Deleter> handle_;
};

// An open store. It closes when it and its namespaces are destroyed; requests in flight are cancelled.
class Store {
  public:
    explicit Store(const Options& options) {
        hoistway_kv* store = nullptr;
        check(hoistway_kv_open(&options, &store));
        handle_.reset(store);
    }

    Namespace open(const Description& description) const {
        hoistway_kv_namespace* blocks = nullptr;
        check(hoistway_kv_namespace_open(handle_.get(), &description, &blocks));
        return Namespace(blocks);
    }

    // Registers memory; see hoistway_kv_register.
    Region add(const hoistway_kv_piece& memory) const {
        hoistway_kv_region* region = nullptr;
        check(hoistway_kv_register(handle_.get(), &memory, &region));
        return Region(region);
    }

    // A descriptor that is readable while requests with HOISTWAY_KV_NOTIFY have ended and were not drained.
    int event_fd() const noexcept { return hoistway_kv_event_fd(handle_.get()); }

    // Returns the ticket numbers of these requests.
    std::vector<std::uint64_t> drain() const {
        std::vector<std::uint64_t> tickets;
        std::uint64_t ended[64];
        std::uint64_t count = 0;
        do {
            check(hoistway_kv_drain(handle_.get(), ended, 64, &count));
            tickets.insert(tickets.end(), ended, ended + count);
        } while (count == 64);
        return tickets;
    }

    void flush(std::uint64_t timeout_ms = UINT64_MAX) const { check(hoistway_kv_flush(handle_.get(), timeout_ms)); }
    void close(std::uint64_t timeout_ms = UINT64_MAX) const { check(hoistway_kv_close(handle_.get(), timeout_ms)); }

    std::string stats() const { return text(hoistway_kv_stats); }
    std::string metrics() const { return text(hoistway_kv_metrics); }
    std::string report() const { return text(hoistway_kv_report); }
    std::string events() const { return text(hoistway_kv_events); }

  private:
    template <typename Say> std::string text(Say say) const {
        return detail::text([&](char** words) { return say(handle_.get(), words); });
    }

    std::unique_ptr<hoistway_kv, detail::Deleter> handle_;
};

} // namespace kv

} // namespace hoistway

#endif
