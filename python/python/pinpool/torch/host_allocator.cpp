// Serves torch's pinned memory from a pool.
//
// torch requests all pinned memory from one object, the HostAllocator of its device. This file replaces that object:
//
//   torch ── allocate, record_event, free ──> HostAllocator ── pinpool_torch_functions ──> pool
//                                                  │
//                                                  └── other requests ──> torch's own allocator
//
// It keeps the blocks in use, the streams that use them, and torch's statistics and history. It uses the pool only through
// pinpool_torch_functions and CUDA only through torch's device guard, so a C++ compiler suffices to build it for the installed
// version of torch. The oldest is 2.11; history and segments came with 2.15.
//
// Locks: one for `blocks_` and one for `captures_`. Neither is held while another lock is taken, or during a call to
// the pool or to torch's allocator. torch's capture filters are called under the second lock.

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ApproximateClock.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#define PINPOOL_TORCH_2_15 (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 15))

namespace {

constexpr auto kDevice = c10::DeviceType::CUDA;
// torch's own allocator registers with priority 0. Of two registrations with equal priority the later one wins.
constexpr uint8_t kPriority = 0;

} // namespace

extern "C" {

// `held_bytes` and `held_buffers` are current values. Fields with `peak`, `max` or `min` are extremes since the pool was
// created. All other fields are totals since then.
struct pinpool_torch_totals {
  int64_t held_bytes, peak_held_bytes, pinned_bytes, unpinned_bytes;
  int64_t held_buffers, pinned_buffers, unpinned_buffers;
  int64_t pin_calls, pin_micros, max_pin_micros, min_pin_micros;
  int64_t unpin_calls, unpin_micros, max_unpin_micros, min_unpin_micros;
};
static_assert(sizeof(pinpool_torch_totals) == 120, "torch.rs has the same size");
static_assert(offsetof(pinpool_torch_totals, max_pin_micros) == 72, "as in torch.rs");

// A stream by its driver handle.
struct pinpool_torch_stream {
  void* handle;
  int32_t device;
};

// Results of calls; torch.rs and __init__.py have the same numbers.
enum pinpool_torch_status {
  PINPOOL_TORCH_OK = 0,
  PINPOOL_TORCH_NO_MEMORY = 1, // There is no memory within the limit, or the driver refused.
  PINPOOL_TORCH_FAILED = 2, // Another failure.
  PINPOOL_TORCH_UNSUITABLE = 3, // This torch has no allocator that can be replaced.
  PINPOOL_TORCH_IN_USE = 4, // An allocator is in use.
};

struct pinpool_torch_functions {
  void* pool;
  // Writes the block and its address and returns OK. Otherwise writes an error text and returns NO_MEMORY or FAILED.
  int (*get)(void* pool, size_t bytes, void** block, void** address, char* error, size_t error_bytes);
  // Releases a block, which is reused after the work enqueued on these streams. Returns 0. If the driver refuses a stream,
  // returns another number, and the caller keeps the block.
  int (*put)(void* block, const pinpool_torch_stream* streams, size_t count);
  void (*trim)(void* pool);
  void (*totals)(void* pool, pinpool_torch_totals* totals);
  // Returns 1 if the stream captures a graph, and 0 if not or if that is unknown.
  int (*is_capturing)(const pinpool_torch_stream* stream);
  // If the address is in a buffer of any pool that torch did not request, records the stream on the buffer and returns 1.
  // Otherwise returns 0.
  int (*record_foreign_buffer)(const void* address, const pinpool_torch_stream* stream);
};

} // extern "C"

namespace {

#if PINPOOL_TORCH_2_15
using c10::CachingDeviceAllocator::CreateContextFn;
using c10::CachingDeviceAllocator::RecordContext;
using c10::CachingDeviceAllocator::TraceEntry;
#else
// What `History` records and when, for a torch without these types.
enum class RecordContext { NEVER, STATE, ALLOC, ALL };
struct TraceEntry {
  enum Action { ALLOC, FREE_REQUESTED, FREE_COMPLETED, OOM };
};
#endif

void free_block(void* address);

// The peak since the last reset of a counter that reports only its all-time peak.
struct Peak {
  // The highest value that was observed since the reset, and the all-time peak at the reset.
  int64_t peak = 0;
  int64_t at_reset = -1;

  int64_t observe(int64_t current, int64_t all_time_peak) {
    // The all-time peak counts if it has risen since the reset.
    peak = std::max({peak, current, all_time_peak > at_reset ? all_time_peak : 0});
    return peak;
  }
};

// A buffer of the pool that torch uses.
struct Block {
  void* handle;
  size_t bytes;
  // The streams that use the block, without duplicates; usually few.
  std::vector<c10::Stream> streams;
  std::shared_ptr<c10::GatheredContext> context;
};

#if PINPOOL_TORCH_2_15
class History {
 public:
  void set(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when, bool clear) {
    if (enabled) {
      recorder_.store(recorder, std::memory_order_relaxed);
      when_.store(when, std::memory_order_relaxed);
      entries_.setMaxEntries(max_entries);
    }
    // Release: a thread that reads `enabled_` also reads the recorder.
    enabled_.store(enabled, std::memory_order_release);
    if (clear) {
      entries_.clear();
    }
  }

  bool is_enabled() const {
    return enabled_.load(std::memory_order_acquire);
  }

  std::shared_ptr<c10::GatheredContext> context(RecordContext required_level) const {
    const auto recorder = recorder_.load(std::memory_order_relaxed);
    return is_enabled() && recorder && when_.load(std::memory_order_relaxed) >= required_level ? recorder() : nullptr;
  }

  void add(TraceEntry::Action action, const void* address, size_t bytes, std::shared_ptr<c10::GatheredContext> context) noexcept {
    if (!is_enabled()) {
      return;
    }
    try {
      const bool keep = when_.load(std::memory_order_relaxed) >= RecordContext::ALLOC;
      entries_.insertEntries(TraceEntry(
          action, -1, reinterpret_cast<size_t>(address), bytes, nullptr, {0, 0}, c10::getApproximateTime(), keep ? std::move(context) : nullptr));
    } catch (const std::exception&) {
      // Out of memory: the history lacks this entry.
    }
  }

  std::vector<TraceEntry> entries() {
    const auto nanoseconds = clock_.makeConverter();
    std::vector<TraceEntry> entries;
    entries_.getEntries(entries);
    for (auto& entry : entries) {
      entry.time_.t_ = nanoseconds(entry.time_.approx_t_) / 1000;
    }
    return entries;
  }

 private:
  std::atomic<bool> enabled_{false};
  std::atomic<CreateContextFn> recorder_{nullptr};
  std::atomic<RecordContext> when_{RecordContext::NEVER};
  c10::RingBuffer<TraceEntry> entries_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};
#else
// This version of torch has no history of pinned memory.
class History {
 public:
  std::shared_ptr<c10::GatheredContext> context(RecordContext) const {
    return nullptr;
  }

  void add(TraceEntry::Action, const void*, size_t, const std::shared_ptr<c10::GatheredContext>&) noexcept {}
};
#endif

class PoolHostAllocator final : public at::HostAllocator {
 public:
  PoolHostAllocator(const pinpool_torch_functions& functions, at::HostAllocator* torch_allocator)
      : functions_(functions), torch_allocator_(torch_allocator) {}

  at::HostAllocator* torch_allocator() const {
    return torch_allocator_;
  }

  // Returns the number of blocks that torch uses, that a thread is returning, or that are kept because a stream cannot be recorded.
  size_t put_deferred_and_count_blocks() {
    put_deferred();
    const std::lock_guard<std::mutex> guard(blocks_mutex_);
    return blocks_.size() + deferred_.size() + returning_;
  }

  bool is_disabled() const {
    return is_disabled_.load(std::memory_order_acquire);
  }

  // From now on torch's own allocator serves every request.
  void disable() {
    is_disabled_.store(true, std::memory_order_release);
  }

  at::DataPtr allocate(size_t bytes) override {
    put_deferred();
    if (is_disabled() || is_for_a_capture()) {
      return torch_allocator_->allocate(bytes);
    }
    if (bytes == 0) {
      return {nullptr, nullptr, &free_block, at::DeviceType::CPU};
    }
    auto context = history_.context(RecordContext::STATE);
    void* handle = nullptr;
    void* address = nullptr;
    char error[4096] = "";
    const int status = functions_.get(functions_.pool, bytes, &handle, &address, error, sizeof error);
    if (status == PINPOOL_TORCH_NO_MEMORY) {
      history_.add(TraceEntry::OOM, nullptr, bytes, context);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "pinpool: ", error);
    }
    // A plain error: after an OutOfMemoryError, programs retry with less memory, which does not help here.
    TORCH_CHECK(status == PINPOOL_TORCH_OK, "pinpool: ", error);
    bool is_added = false;
    try {
      is_added = add({handle, bytes, {}, context}, address);
    } catch (...) { // Out of memory.
      functions_.put(handle, nullptr, 0);
      throw;
    }
    if (!is_added) {
      functions_.put(handle, nullptr, 0);
      return torch_allocator_->allocate(bytes);
    }
    history_.add(TraceEntry::ALLOC, address, bytes, std::move(context));
    // The context is the address, as raw_allocate requires.
    return {address, address, &free_block, at::DeviceType::CPU};
  }

  // Called by destructors, which must not throw.
  void free(void* address) noexcept {
    std::shared_ptr<c10::GatheredContext> context;
    try {
      context = history_.context(RecordContext::ALL);
    } catch (const std::exception&) {
      // torch's recorder failed, so the history has the context of the allocation.
    }
    Block block;
    {
      const std::lock_guard<std::mutex> guard(blocks_mutex_);
      const auto found = blocks_.find(address);
      if (found == blocks_.end()) {
        return; // Not a block of this allocator.
      }
      block = std::move(found->second);
      blocks_.erase(found);
      ++returning_;
      requests_.decrease(1);
      bytes_.decrease(block.bytes);
    }
    if (!context) {
      context = block.context;
    }
    // The pool does not report when the copies end, so the history has both events at the time of the free.
    history_.add(TraceEntry::FREE_REQUESTED, address, block.bytes, context);
    history_.add(TraceEntry::FREE_COMPLETED, address, block.bytes, context);
    put_deferred();
    put(std::move(block));
  }

  at::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // Called after each non-blocking copy. Fences for a block are recorded only when it is freed, because torch uses it until then.
  bool record_event(void* pointer, void* context, c10::Stream stream) override {
    {
      const std::lock_guard<std::mutex> guard(blocks_mutex_);
      auto found = blocks_.find(context);
      if (found == blocks_.end()) {
        found = holder_of(pointer);
      }
      if (found != blocks_.end()) {
        auto& streams = found->second.streams;
        if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
          streams.push_back(stream);
        }
        return true;
      }
    }
    return functions_.record_foreign_buffer(pointer, native_streams({stream}).data()) != 0 || torch_allocator_->record_event(pointer, context, stream);
  }

  void empty_cache() override {
    put_deferred();
    functions_.trim(functions_.pool);
    torch_allocator_->empty_cache();
  }

  at::HostStats get_stats() override {
    at::HostStats stats;
    const auto now = totals();
    const std::lock_guard<std::mutex> guard(blocks_mutex_);
    stats.active_requests = requests_;
    stats.active_bytes = bytes_;
    stats.allocations.current = now.held_buffers;
    stats.allocations.peak = peak_buffers_.observe(now.held_buffers, 0);
    stats.allocations.allocated = now.pinned_buffers - totals_at_reset_.pinned_buffers;
    stats.allocations.freed = now.unpinned_buffers - totals_at_reset_.unpinned_buffers;
    stats.allocated_bytes.current = now.held_bytes;
    stats.allocated_bytes.peak = peak_bytes_.observe(now.held_bytes, now.peak_held_bytes);
    stats.allocated_bytes.allocated = now.pinned_bytes - totals_at_reset_.pinned_bytes;
    stats.allocated_bytes.freed = now.unpinned_bytes - totals_at_reset_.unpinned_bytes;
    stats.host_alloc_time.total = now.pin_micros - totals_at_reset_.pin_micros;
    stats.host_alloc_time.count = now.pin_calls - totals_at_reset_.pin_calls;
    stats.host_alloc_time.max = now.max_pin_micros;
    stats.host_alloc_time.min = now.min_pin_micros;
    stats.host_free_time.total = now.unpin_micros - totals_at_reset_.unpin_micros;
    stats.host_free_time.count = now.unpin_calls - totals_at_reset_.unpin_calls;
    stats.host_free_time.max = now.max_unpin_micros;
    stats.host_free_time.min = now.min_unpin_micros;
    stats.num_host_alloc = stats.host_alloc_time.count;
    stats.num_host_free = stats.host_free_time.count;
    return stats;
  }

  void reset_accumulated_stats() override {
    const auto now = totals();
    const std::lock_guard<std::mutex> guard(blocks_mutex_);
    totals_at_reset_ = now;
    requests_.reset_accumulated();
    bytes_.reset_accumulated();
  }

  // The pool has only the all-time peak of its bytes. Other peaks of counts are kept here, as observed by get_stats().
  // The extremes of the times are never reset.
  void reset_peak_stats() override {
    const auto now = totals();
    const std::lock_guard<std::mutex> guard(blocks_mutex_);
    requests_.reset_peak();
    bytes_.reset_peak();
    peak_buffers_ = {now.held_buffers, 0};
    peak_bytes_ = {now.held_bytes, now.peak_held_bytes};
  }

  // Memory of a captured graph must exist as long as the graph, so torch's own allocator serves it.
  void begin_allocate_to_pool(c10::MempoolId_t pool, std::function<bool(c10::Stream)> filter) override {
    {
      const std::lock_guard<std::mutex> guard(captures_mutex_);
      // A failed capture does not end its pool, so an entry for it may be left.
      forget_capture(pool);
      captures_.emplace_back(pool, filter);
    }
    any_capture_.store(true, std::memory_order_release);
    torch_allocator_->begin_allocate_to_pool(pool, std::move(filter));
  }

  void end_allocate_to_pool(c10::MempoolId_t pool) override {
    {
      const std::lock_guard<std::mutex> guard(captures_mutex_);
      forget_capture(pool);
    }
    torch_allocator_->end_allocate_to_pool(pool);
  }

  // Called when the graph is destroyed, also after a failed capture that did not end its pool.
  void release_pool(c10::MempoolId_t pool) override {
    {
      const std::lock_guard<std::mutex> guard(captures_mutex_);
      forget_capture(pool);
    }
    torch_allocator_->release_pool(pool);
  }

#if PINPOOL_TORCH_2_15
  void record_history(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when, bool clear) override {
    history_.set(enabled, recorder, max_entries, when, clear);
    torch_allocator_->record_history(enabled, recorder, max_entries, when, clear);
  }

  bool is_history_enabled() const override {
    return history_.is_enabled();
  }

  std::vector<at::HostSegmentInfo> get_segments() override {
    auto segments = torch_allocator_->get_segments();
    const std::lock_guard<std::mutex> guard(blocks_mutex_);
    for (const auto& [address, block] : blocks_) {
      at::HostSegmentInfo segment;
      segment.address = reinterpret_cast<size_t>(address);
      segment.size = block.bytes;
      segment.allocated = segment.active = true;
      segment.context_when_allocated = block.context;
      segments.push_back(std::move(segment));
    }
    return segments;
  }

  std::vector<TraceEntry> get_traces() override {
    auto entries = torch_allocator_->get_traces();
    const auto ours = history_.entries();
    entries.insert(entries.end(), ours.begin(), ours.end());
    const auto earlier = [](const TraceEntry& left, const TraceEntry& right) { return left.time_.t_ < right.time_.t_; };
    std::stable_sort(entries.begin(), entries.end(), earlier);
    return entries;
  }

  void record_external_register(void* address, size_t bytes) override {
    torch_allocator_->record_external_register(address, bytes);
  }

  void record_external_unregister(void* address) override {
    torch_allocator_->record_external_unregister(address);
  }
#endif

 private:
  using Blocks = std::map<void*, Block>;

  // Returns false after `disable`: `uninstall` may have counted the blocks already, so nothing would track this block.
  bool add(Block block, void* address) {
    const std::lock_guard<std::mutex> guard(blocks_mutex_);
    if (is_disabled()) {
      return false;
    }
    const size_t bytes = block.bytes;
    blocks_.emplace(address, std::move(block)); // May throw, so the counters follow.
    requests_.increase(1);
    bytes_.increase(bytes);
    return true;
  }

  // The caller holds the lock.
  void forget_capture(c10::MempoolId_t pool) {
    const auto of_pool = [&](const auto& capture) { return capture.first == pool; };
    captures_.erase(std::remove_if(captures_.begin(), captures_.end(), of_pool), captures_.end());
    any_capture_.store(!captures_.empty(), std::memory_order_release);
  }

  // The block that contains this byte. The caller holds the lock.
  Blocks::iterator holder_of(void* pointer) {
    auto after = blocks_.upper_bound(pointer);
    if (after == blocks_.begin()) {
      return blocks_.end();
    }
    const auto before = std::prev(after);
    const auto offset = static_cast<char*>(pointer) - static_cast<char*>(before->first);
    return static_cast<size_t>(offset) < before->second.bytes ? before : blocks_.end();
  }

  pinpool_torch_totals totals() const {
    pinpool_torch_totals totals{};
    functions_.totals(functions_.pool, &totals);
    return totals;
  }

  // True if the current stream is captured into a graph with a memory pool.
  bool is_for_a_capture() const {
    if (!any_capture_.load(std::memory_order_acquire)) {
      return false;
    }
    const c10::impl::VirtualGuardImpl device(kDevice);
    const auto stream = device.getStream(device.getDevice());
    const std::lock_guard<std::mutex> guard(captures_mutex_);
    return std::any_of(captures_.begin(), captures_.end(), [&](const auto& capture) { return capture.second(stream); });
  }

  static std::vector<pinpool_torch_stream> native_streams(const std::vector<c10::Stream>& streams) {
    std::vector<pinpool_torch_stream> natives;
    if (!streams.empty()) {
      const c10::impl::VirtualGuardImpl device(kDevice);
      natives.reserve(streams.size());
      for (const auto& stream : streams) {
        natives.push_back({device.getStreamNativeHandle(stream), stream.device_index()});
      }
    }
    return natives;
  }

  // From 2.15 on torch's device guard reports this; before that, the driver does.
  bool is_capturing([[maybe_unused]] const Block& block, [[maybe_unused]] const std::vector<pinpool_torch_stream>& streams) const {
#if PINPOOL_TORCH_2_15
    if (block.streams.empty()) {
      return false;
    }
    const c10::impl::VirtualGuardImpl device(kDevice);
    return std::any_of(block.streams.begin(), block.streams.end(), [&](const auto& stream) { return device.isStreamCapturing(stream); });
#else
    return std::any_of(streams.begin(), streams.end(), [&](const auto& stream) { return functions_.is_capturing(&stream) != 0; });
#endif
  }

  // The block is counted in `returning_`.
  void put(Block block) noexcept {
    try {
      const auto streams = native_streams(block.streams);
      // A fence on a capturing stream would become part of the graph.
      if (!is_capturing(block, streams) && functions_.put(block.handle, streams.data(), streams.size()) == 0) {
        --returning_;
        return;
      }
    } catch (const std::exception&) {
      // The device failed, so it is unknown whether its copies have completed.
    }
    try {
      // Kept until the capture ends, or the device responds again.
      const std::lock_guard<std::mutex> guard(blocks_mutex_);
      deferred_.push_back(std::move(block));
      --returning_;
      any_deferred_.store(true, std::memory_order_release);
    } catch (const std::exception&) {
      // Out of memory: the block is leaked. It stays counted in `returning_`, and its memory is never reused.
    }
  }

  void put_deferred() {
    if (!any_deferred_.load(std::memory_order_acquire)) {
      return;
    }
    std::vector<Block> deferred;
    {
      const std::lock_guard<std::mutex> guard(blocks_mutex_);
      deferred.swap(deferred_);
      returning_ += deferred.size();
      any_deferred_.store(false, std::memory_order_release);
    }
    for (auto& block : deferred) {
      put(std::move(block));
    }
  }

  const pinpool_torch_functions functions_;
  at::HostAllocator* const torch_allocator_;
  std::atomic<bool> is_disabled_{false};
  History history_;

  mutable std::mutex blocks_mutex_;
  Blocks blocks_;
  std::vector<Block> deferred_;
  std::atomic<bool> any_deferred_{false};
  // Number of blocks that a thread is returning; they are in neither `blocks_` nor `deferred_`.
  std::atomic<size_t> returning_{0};
  c10::CachingAllocator::Stat requests_;
  c10::CachingAllocator::Stat bytes_;
  // Totals at the last reset.
  pinpool_torch_totals totals_at_reset_{};
  Peak peak_buffers_;
  Peak peak_bytes_;

  mutable std::mutex captures_mutex_;
  std::vector<std::pair<c10::MempoolId_t, std::function<bool(c10::Stream)>>> captures_;
  std::atomic<bool> any_capture_{false};
};

// Deleted only if torch refused it, because tensors may free blocks until the process exits. Set before the first allocation.
std::atomic<PoolHostAllocator*> installed{nullptr};

void free_block(void* address) {
  if (address != nullptr) {
    installed.load(std::memory_order_acquire)->free(address);
  }
}

// How a call ended: OK, or another status with its text.
struct Outcome {
  pinpool_torch_status status = PINPOOL_TORCH_OK;
  const char* text = "";
};

// Returns OK if an allocator may be installed.
Outcome check_suitability() {
  auto* allocator = installed.load(std::memory_order_acquire);
  if (at::getHostAllocator(kDevice) == nullptr) {
    return {PINPOOL_TORCH_UNSUITABLE, "this torch has no allocator of pinned memory: it was built without CUDA"};
  }
  if (allocator != nullptr && !allocator->is_disabled()) {
    return {PINPOOL_TORCH_IN_USE, "installed already: call uninstall first"};
  }
  if (allocator != nullptr && allocator->put_deferred_and_count_blocks() > 0) {
    return {PINPOOL_TORCH_IN_USE, "tensors still use memory of the pool that was installed before: drop them first"};
  }
  return {};
}

// Returns the status of the outcome that `call` returns, or FAILED if it throws, and writes the text.
template <typename Call>
int report(char* error, size_t error_bytes, Call call) {
  try {
    const Outcome outcome = call();
    std::snprintf(error, error_bytes, "%s", outcome.text);
    return outcome.status;
  } catch (const std::exception& failure) {
    std::snprintf(error, error_bytes, "%s", failure.what());
    return PINPOOL_TORCH_FAILED;
  }
}

} // namespace

extern "C" {

// Returns OK if an allocator may be installed, or another status with its text.
int pinpool_torch_check(char* error, size_t error_bytes) {
  return report(error, error_bytes, check_suitability);
}

// Returns OK. Otherwise returns another status with its text, and no longer uses `functions`. Called by one thread, before
// others request pinned memory from torch.
int pinpool_torch_install(const pinpool_torch_functions* functions, char* error, size_t error_bytes) {
  return report(error, error_bytes, [&]() -> Outcome {
    if (const Outcome outcome = check_suitability(); outcome.status != PINPOOL_TORCH_OK) {
      return outcome;
    }
    auto* torch_allocator = at::getHostAllocator(kDevice);
    auto* previous = installed.load(std::memory_order_acquire);
    if (torch_allocator == previous) {
      torch_allocator = previous->torch_allocator();
    }
    // The previous one is not deleted, because threads may still use it.
    auto* allocator = new PoolHostAllocator(*functions, torch_allocator);
    installed.store(allocator, std::memory_order_release);
    try {
      at::setHostAllocator(kDevice, allocator, kPriority);
    } catch (...) {
      installed.store(previous, std::memory_order_release);
      delete allocator;
      throw;
    }
    if (at::getHostAllocator(kDevice) == allocator) {
      return {};
    }
    installed.store(previous, std::memory_order_release);
    delete allocator; // torch never had it.
    return {PINPOOL_TORCH_IN_USE, "another allocator of pinned memory with a higher priority is installed"};
  });
}

// From now on torch's own allocator serves all requests. Writes the number of blocks in use. While there are such blocks, this
// allocator stays installed and forwards requests, because it tracks the streams of the blocks. Returns OK, or FAILED with a text.
int pinpool_torch_uninstall(size_t* blocks_in_use, char* error, size_t error_bytes) {
  *blocks_in_use = 0;
  return report(error, error_bytes, [&]() -> Outcome {
    auto* allocator = installed.load(std::memory_order_acquire);
    if (allocator != nullptr) {
      allocator->disable();
      *blocks_in_use = allocator->put_deferred_and_count_blocks();
      if (*blocks_in_use == 0 && at::getHostAllocator(kDevice) == allocator) {
        at::setHostAllocator(kDevice, allocator->torch_allocator(), kPriority);
      }
    }
    return {};
  });
}

} // extern "C"
