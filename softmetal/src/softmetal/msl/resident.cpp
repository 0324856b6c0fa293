// Keeps a compiler loaded, because clang takes 25 ms to load and relocate its libraries, as long as for a small kernel.
// LD_PRELOAD puts this library into the compiler's process. There it runs in place of `main`: for each request it forks
// a process, which calls `main`.
//
// A request is a message on the socket that is file descriptor 3: the working directory, the number of arguments, the
// arguments after the program's name, and the environment, each with a 0 at the end. Four descriptors come with it:
// input, output, messages, and a pipe that takes the exit status as one byte. The process ends when the socket closes.
#include <dlfcn.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

extern "C" char** environ;

namespace {

using Main = int (*)(int, char**, char**);
using Start = int (*)(Main, int, char**, void (*)(), void (*)(), void (*)(), void*);

constexpr int kChannel = 3, kDescriptors = 4;
constexpr size_t kLongestRequest = 1 << 20;  // in bytes; resident.py sets the socket's buffer to the same size

Main compiler_main = nullptr;

void tell_status(int pipe, int status) {
  const unsigned char byte = static_cast<unsigned char>(status);
  if (write(pipe, &byte, 1) != 1) return;  // whoever asked has ended
}

// Receives a request. Returns the number of bytes, or 0 if the socket is closed.
ssize_t receive(char* text, int (&descriptors)[kDescriptors]) {
  iovec part = {text, kLongestRequest};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptors)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t n;
  do
    n = recvmsg(kChannel, &message, 0);
  while (n < 0 && errno == EINTR);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (n <= 0 || header == nullptr || header->cmsg_len != CMSG_LEN(sizeof descriptors)) return 0;
  std::memcpy(descriptors, CMSG_DATA(header), sizeof descriptors);
  return n;
}

[[noreturn]] void answer(char* text, const char* end, const int (&descriptors)[kDescriptors], char** own) {
  signal(SIGINT, SIG_DFL);
  signal(SIGPIPE, SIG_DFL);
  const sigset_t none = {};
  sigprocmask(SIG_SETMASK, &none, nullptr);
  close(kChannel);
  close(descriptors[3]);
  std::vector<char*> words;
  for (char* word = text; word < end; word += std::strlen(word) + 1)
    words.push_back(word);
  for (int i = 0; i < 3; ++i) {
    dup2(descriptors[i], i);
    close(descriptors[i]);
  }
  lseek(0, 0, SEEK_SET);
  if (chdir(words[0]) != 0) exit(1);
  const auto first_entry = words.begin() + 2 + std::atoi(words[1]);
  // never freed, because the process needs them until it ends
  auto& arguments = *new std::vector<char*>;
  auto& entries = *new std::vector<char*>(first_entry, words.end());
  while (*own != nullptr)  // if the compiler is a script, its interpreter comes before its own name
    arguments.push_back(*own++);
  arguments.insert(arguments.end(), words.begin() + 2, first_entry);
  arguments.push_back(nullptr);
  entries.push_back(nullptr);
  environ = entries.data();
  exit(compiler_main(static_cast<int>(arguments.size()) - 1, arguments.data(), environ));
}

// Reports the statuses of the processes that have ended. `pipes` has the pipe of each process.
void tell_ended(std::map<pid_t, int>& pipes) {
  int status = 0;
  for (pid_t child; (child = waitpid(-1, &status, WNOHANG)) > 0;) {
    const auto pipe = pipes.find(child);
    if (pipe == pipes.end()) continue;
    tell_status(pipe->second, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    close(pipe->second);
    pipes.erase(pipe);
  }
}

int serve(int, char** own, char**) {
  close_range(kChannel + 1, ~0U, 0);  // the reader of an inherited pipe would wait until this process closes its copy
  // an interrupt from the terminal ends the requesting process, and this process ends after it
  signal(SIGINT, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGCHLD, SIG_DFL);  // if SIGCHLD is inherited as ignored, the statuses of children are lost
  sigset_t ends = {};
  sigaddset(&ends, SIGCHLD);
  sigprocmask(SIG_BLOCK, &ends, nullptr);
  pollfd events[] = {{kChannel, POLLIN, 0}, {signalfd(-1, &ends, SFD_CLOEXEC | SFD_NONBLOCK), POLLIN, 0}};
  if (send(kChannel, "", 1, MSG_NOSIGNAL) != 1) _exit(0);  // tells that this library is in charge
  auto& text = *new std::vector<char>(kLongestRequest + 1);
  std::map<pid_t, int> pipes;
  while (true) {
    if (poll(events, 2, -1) < 0) continue;
    signalfd_siginfo ended;
    while (read(events[1].fd, &ended, sizeof ended) > 0) {
    }
    tell_ended(pipes);
    if (events[0].revents == 0) continue;
    int descriptors[kDescriptors];
    const ssize_t n = receive(text.data(), descriptors);
    if (n <= 0) _exit(0);
    text[static_cast<size_t>(n)] = 0;
    const pid_t child = fork();
    if (child == 0) answer(text.data(), text.data() + n, descriptors, own);
    if (child < 0) {
      dprintf(descriptors[2], "cannot fork: %s\n", strerror(errno));
      tell_status(descriptors[3], 1);
      close(descriptors[3]);
    } else {
      pipes[child] = descriptors[3];
    }
    for (int i = 0; i < 3; ++i)
      close(descriptors[i]);
  }
}

}  // namespace

extern "C" int __libc_start_main(Main main, int argc, char** argv, void (*init)(), void (*fini)(), void (*ended)(),
                                 void* stack) {
  unsetenv("LD_PRELOAD");
  compiler_main = main;
  const auto start = reinterpret_cast<Start>(dlsym(RTLD_NEXT, "__libc_start_main"));
  return start(serve, argc, argv, init, fini, ended, stack);
}
