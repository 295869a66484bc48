// SPDX-License-Identifier: Apache-2.0
#include "transport/link_watcher.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>

#include <system_error>

#include "base/log.h"
#include "transport/unix_socket.h"
#include "transport/wire.h"

namespace moe {
namespace {

constexpr uint32_t kDepartureMagic = 0x6d6f6564;
constexpr size_t kMaxPacketBytes = 256;

std::thread startWithoutSignals(void (*body)(void*), void* argument) {
  // Handlers of the application must run on its own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  int error = 0;
  try {
    thread = std::thread(body, argument);
  } catch (const std::system_error& failure) {
    error = failure.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) failErrno(error, "cannot start the thread that watches the other ranks of this host");
  return thread;
}

}  // namespace

std::string departurePacket(PeerState state) {
  std::string packet;
  putValue(&packet, kDepartureMagic);
  putValue(&packet, static_cast<uint32_t>(state));
  return packet;
}

bool parseDeparture(std::string_view packet, PeerState* state) {
  uint32_t magic = 0;
  uint32_t value = 0;
  if (!takeValue(&packet, &magic) || !takeValue(&packet, &value) || !packet.empty()) return false;
  auto said = static_cast<PeerState>(value);
  if (magic != kDepartureMagic || value > 255 || (said != PeerState::kLeft && said != PeerState::kAborted))
    return false;
  *state = said;
  return true;
}

LinkWatcher::LinkWatcher(int rank, std::vector<Watched> links, std::shared_ptr<PeerStates> states)
    : rank_(rank), links_(std::move(links)), states_(std::move(states)), stop_(::eventfd(0, EFD_CLOEXEC)) {
  if (!stop_.valid()) failErrno(errno, "cannot make an eventfd to stop the watch over the other ranks");
  thread_ = startWithoutSignals([](void* self) { static_cast<LinkWatcher*>(self)->run(); }, this);
}

LinkWatcher::~LinkWatcher() {
  // Cannot fail: the counter of a fresh eventfd has room for one.
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

void LinkWatcher::run() {
  pthread_setname_np(pthread_self(), "moe-links");
  while (!links_.empty()) {
    std::vector<pollfd> waits{{stop_.get(), POLLIN, 0}};
    for (const Watched& link : links_) {
      waits.push_back({link.socket->get(), POLLIN, 0});
      waits.push_back({link.process->get(), POLLIN, 0});  // poll(2) passes over -1
    }
    if (::poll(waits.data(), waits.size(), -1) < 0) continue;
    if (waits[0].revents != 0) return;
    std::vector<Watched> remaining;
    for (size_t i = 0; i < links_.size(); ++i) {
      const Watched& link = links_[i];
      bool processGone = waits[2 + 2 * i].revents != 0;
      bool open = (waits[1 + 2 * i].revents == 0 && !processGone) || drain(link);
      if (open && processGone) end(link, "its process ended");
      if (open && !processGone) remaining.push_back(link);
    }
    links_ = std::move(remaining);
  }
}

bool LinkWatcher::drain(const Watched& link) {
  for (;;) {
    Packet packet = receivePacket(*link.socket, kMaxPacketBytes);
    if (packet.status == Packet::kNothingYet) return true;
    if (packet.status == Packet::kClosed) {
      end(link, packet.error == 0 ? "its socket closed" : cat("its socket failed: ", std::strerror(packet.error)));
      return false;
    }
    PeerState said{};
    if (packet.cut || !packet.descriptors.empty() || !parseDeparture(packet.bytes, &said)) {
      log(LogLevel::kWarn, "rank ", rank_, " got ", packet.bytes.size(), " bytes from rank ", link.peer,
          " that no rank of this version sends, and takes it for dead");
      states_->set(link.peer, PeerState::kDead);
      return false;
    }
    states_->set(link.peer, said);
  }
}

void LinkWatcher::end(const Watched& link, const std::string& how) {
  if (states_->get(link.peer) != PeerState::kAlive) return;
  log(LogLevel::kInfo, "rank ", rank_, " lost rank ", link.peer, ", which had not said that it leaves: ", how);
  states_->set(link.peer, PeerState::kDead);
}

}  // namespace moe
