/* The session functions of the video engine libraries: each call succeeds, and a handle is closed once. */
#include <stdint.h>
#include <stdlib.h>

typedef int status;

static status make(void **out)
{
	*out = malloc(1);
	return 0;
}

static status end(void *session)
{
	/* NV_ENC_ERR_INVALID_PTR */
	if (!session)
		return 6;
	free(session);
	return 0;
}

#ifdef ENCODE
static status open_session(void *device, unsigned kind, void **out) { return (void)device, (void)kind, make(out); }
static status open_session_ex(void *parameters, void **out) { return (void)parameters, make(out); }

/* NV_ENCODE_API_FUNCTION_LIST of nvEncodeAPI.h. */
struct functions {
	uint32_t version, reserved;
	void *all[318];
};

status NvEncodeAPICreateInstance(struct functions *list)
{
	list->all[0] = (void *)open_session;
	list->all[27] = (void *)end;
	list->all[29] = (void *)open_session_ex;
	return 0;
}
#else
status cuvidCreateDecoder(void **out, void *information) { return (void)information, make(out); }
status cuvidDestroyDecoder(void *session) { return end(session); }
#endif
