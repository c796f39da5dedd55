// Symbols that g++ would take from a newer libstdc++ or glibc than systems of manylinux_2_28 have: the streams in which
// torch's headers put together their messages, and the flag that a shared_ptr asks. Defined here, the library needs none.
// The flag is 0 as in a process of many threads. What g++ converts float16 with comes from libgcc.a; see setup.py.
#include <sstream>

#ifdef __GLIBCXX__
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif
