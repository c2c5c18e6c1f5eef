# The source package of ik_llama.cpp (0.1.5) lacks a file of its build, which names the commit. This is written in its
# place, when the project is configured.
set(MISSING ${CMAKE_SOURCE_DIR}/vendor/ik_llama.cpp/common/cmake/build-info-gen-cpp.cmake)
if(NOT EXISTS ${MISSING})
  file(WRITE ${MISSING} "set(BUILD_NUMBER 0)\nconfigure_file(common/build-info.cpp.in common/build-info.cpp)\n")
endif()
