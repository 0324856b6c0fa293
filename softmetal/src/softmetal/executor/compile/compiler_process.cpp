// The compiler's imports take as long as a small kernel. One process (msl/server.py) therefore imports the compiler
// once, and forks for each request. It ends together with the process that started it.
#include "compile/compiler_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>

extern char** environ;

namespace softmetal {
namespace {

// Owns a file descriptor and closes it.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  int get() const { return number_; }

  void reset(int number = -1) {
    if (number_ >= 0) close(number_);
    number_ = number;
  }

 private:
  int number_;
};

std::string error_text(const std::string& what) {
  return what + ": " + std::strerror(errno);
}

// Returns the environment of the compiler as NAME=VALUE.
std::vector<std::string> environment(const CompilerPlace& place) {
  std::vector<std::string> entries = {"PYTHONPATH=" + place.home};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "PYTHONPATH=", 11) != 0) entries.push_back(*entry);
  }
  return entries;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts)
    result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

class Server {
 public:
  // Sends a request with four descriptors: the compiler's input, output and messages, and a pipe for its status.
  // Returns an error, or "".
  std::string send(const CompilerPlace& place, const std::string& request, const int (&descriptors)[4]) {
    const std::lock_guard lock(mutex_);
    const char* set = std::getenv("SOFTMETAL_CXX");
    const std::string compiler = set != nullptr ? set : "";
    // A forked process starts its own server, because the parent's server ends with the parent.
    const bool fits = channel_.get() >= 0 && process_ == getpid() && place_ == place && compiler_ == compiler;
    if (fits && send_now(request, descriptors)) return "";
    place_ = place;
    compiler_ = compiler;
    process_ = getpid();
    if (std::string error = start(); !error.empty()) return error;
    return send_now(request, descriptors) ? "" : error_text("cannot send a request to the Metal compiler");
  }

 private:
  std::string start() {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) return error_text("socketpair");
    channel_.reset(pair[0]);
    const Descriptor other(pair[1]);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, other.get(), 3);
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
    // Closes inherited descriptors. Otherwise, if one is the writing end of a pipe, the pipe's reader would wait for
    // this process.
    posix_spawn_file_actions_addclosefrom_np(&files, 4);
    // -S skips the start-up files of site-packages, which can take as long as the compiler's own imports. The compiler
    // needs only the standard library.
    std::vector<std::string> arguments = {place_.python, "-S", "-m", "msl.server"}, entries = environment(place_);
    pid_t child;
    const int failed = posix_spawnp(&child, place_.python.c_str(), &files, nullptr, pointers(arguments).data(),
                                    pointers(entries).data());
    posix_spawn_file_actions_destroy(&files);
    return failed != 0 ? "cannot start " + place_.python + ": " + std::strerror(failed) : "";
  }

  bool send_now(const std::string& request, const int (&descriptors)[4]) {
    iovec part = {const_cast<char*>(request.data()), request.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptors)] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptors);
    std::memcpy(CMSG_DATA(header), descriptors, sizeof descriptors);
    ssize_t sent;
    do
      sent = sendmsg(channel_.get(), &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == static_cast<ssize_t>(request.size());
  }

  std::mutex mutex_;
  Descriptor channel_;
  CompilerPlace place_;
  std::string compiler_;  // the value of SOFTMETAL_CXX when the compiler was imported
  pid_t process_ = -1;
};

std::string content(int file) {
  std::string text;
  char part[65536];
  for (ssize_t n; (n = pread(file, part, sizeof part, static_cast<off_t>(text.size()))) > 0;)
    text.append(part, static_cast<size_t>(n));
  return text;
}

// Returns the status that the compiler writes to the pipe, or -1 if it ends without writing a status.
int wait_for_status(int pipe) {
  unsigned char status;
  ssize_t n;
  do
    n = read(pipe, &status, 1);
  while (n < 0 && errno == EINTR);
  return n == 1 ? status : -1;
}

}  // namespace

Answer run_compiler(const CompilerPlace& place, const std::vector<std::string>& arguments, const std::string& source) {
  static Server& server = *new Server;  // never destroyed, because threads may still compile while the process exits
  // Files in memory, because a pipe could fill up and block the compiler.
  const Descriptor in(memfd_create("metal source", MFD_CLOEXEC)), out(memfd_create("library", MFD_CLOEXEC)),
      err(memfd_create("messages", MFD_CLOEXEC));
  int ends[2];
  if (in.get() < 0 || out.get() < 0 || err.get() < 0 || pipe2(ends, O_CLOEXEC) != 0)
    return {-1, "", error_text("cannot start the Metal compiler")};
  const Descriptor read_end(ends[0]);
  Descriptor write_end(ends[1]);
  for (size_t written = 0; written < source.size();) {
    const ssize_t n = pwrite(in.get(), source.data() + written, source.size() - written, static_cast<off_t>(written));
    if (n < 0) return {-1, "", error_text("cannot write the Metal source")};
    written += static_cast<size_t>(n);
  }
  // The number of arguments, the arguments and the environment, each with a 0 at the end.
  std::string request = std::to_string(arguments.size()) + '\0';
  for (const std::vector<std::string>& texts : {arguments, environment(place)}) {
    for (const std::string& text : texts)
      request.append(text).push_back('\0');
  }
  std::string error = server.send(place, request, {in.get(), out.get(), err.get(), write_end.get()});
  if (!error.empty()) return {-1, "", error};
  write_end.reset();
  const int status = wait_for_status(read_end.get());
  std::string messages = content(err.get());
  if (status < 0 && messages.empty()) messages = "the Metal compiler ended without an answer";
  return {status, content(out.get()), messages};
}

}  // namespace softmetal
